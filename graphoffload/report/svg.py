"""The few SVG elements that the drawings are made of. Text in, text out; nothing here knows a graph."""

from __future__ import annotations

import re
from collections.abc import Sequence
from xml.sax.saxutils import escape, quoteattr

_NOT_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def element(tag: str, *children: str, text: str | None = None, title: str = "", **attributes: str | float) -> str:
    """One element; an underscore in an attribute's name becomes a hyphen ("class_" is class), `title` its tooltip."""
    names = " ".join(f"{name.rstrip('_').replace('_', '-')}={quoteattr(_value(v))}" for name, v in attributes.items())
    inside = (f"<title>{clean(title)}</title>" if title else "") + "".join(children) + ("" if text is None else clean(text))
    head = f"{tag} {names}".rstrip()
    return f"<{head}>{inside}</{tag}>" if inside else f"<{head}/>"


def clean(text: str) -> str:
    """`text` escaped for XML; characters that XML cannot hold become "?". A parser would read a plain "\\r\\n" as "\\n"."""
    return escape(_NOT_XML.sub("?", text), {"\r": "&#13;"})


def page(width: float, height: float, body: Sequence[str], *, font_size: float = 10) -> str:
    """A whole SVG file: a white page of `width` x `height` pixels that scales with its window."""
    drawn = element(
        "svg", element("rect", width="100%", height="100%", fill="#ffffff"), "\n", "\n".join(body), "\n",
        xmlns="http://www.w3.org/2000/svg", viewBox=f"0 0 {_value(width)} {_value(height)}", width=width, height=height,
        font_family="DejaVu Sans Mono, Menlo, Consolas, monospace", font_size=font_size,
    )  # fmt: skip
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{drawn}\n'


def shorten(text: str, characters: int) -> str:
    """`text` in at most `characters`, cut in the middle: both ends of a node's name identify it."""
    if len(text) <= characters:
        return text
    tail = max((characters - 1) // 2, 0)
    return f"{text[: max(characters - 1 - tail, 0)]}\u2026{text[len(text) - tail :] if tail else ''}"


def _value(value: str | float) -> str:
    """Numbers with at most two digits: a drawing of 2000 nodes stays small."""
    return value if isinstance(value, str) else f"{value:.2f}".rstrip("0").rstrip(".")
