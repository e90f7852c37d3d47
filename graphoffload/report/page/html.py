"""The page's file: its template, style and script, plotly.js, and the content as JSON, in one text.

plotly.js (about 4.8 MB) comes from the Python package plotly, which has it as a file, so that no network is needed, here or
where the page is opened. Names from the model reach the page as JSON and are shown as text, never as markup.
"""

from __future__ import annotations

import html
import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from string import Template
from typing import Any

from graphoffload.cache_files import write_whole
from graphoffload.errors import ConfigError

_HERE = Path(__file__).parent
_MISSING = (
    "{what} is drawn with plotly, which is not installed in this environment. Install it: pip install 'graphoffload[html]' (or "
    "pip install 'plotly>=6'). Without it there are the table, print(report), and the pictures, report.save_pictures(folder)."
)


def can_draw() -> bool:
    """Whether plotly is installed."""
    try:
        return importlib.util.find_spec("plotly.offline") is not None
    except ModuleNotFoundError:
        return False


def require_plotly(what: str) -> None:
    """Raises ConfigError if plotly is not installed; `what` is what it is needed for."""
    if not can_draw():
        raise ConfigError(_MISSING.format(what=what))


def page_html(title: str, content: Mapping[str, Any]) -> str:
    """The page as the text of an HTML file.

    Raises:
        ConfigError: plotly is not installed.
    """
    require_plotly("The page")
    from plotly.offline import get_plotlyjs

    return Template((_HERE / "page.html").read_text(encoding="utf-8")).substitute(
        title=html.escape(title),
        style=(_HERE / "page.css").read_text(encoding="utf-8"),
        plotly=_in_script(get_plotlyjs()),
        content=_as_json(content),
        script=_in_script((_HERE / "page.js").read_text(encoding="utf-8")),
    )


def write_page(path: str | Path, title: str, content: Mapping[str, Any]) -> Path:
    """Write the page; returns its path.

    Raises:
        ConfigError: it cannot be written, or plotly is not installed.
    """
    target = Path(path).expanduser()
    text = page_html(title, content)
    try:
        if target.is_dir():
            raise IsADirectoryError(21, "Is a directory")
        return write_whole(target, text)
    except OSError as error:
        raise ConfigError(
            f"the page cannot be written to {str(path)!r}: {error.strerror or error} (errno {error.errno}). Name a file in a "
            'folder that this process may write to, such as "plan.html".'
        ) from error


def framed(page: str, height: int = 900) -> str:
    """A page as an element of another one, such as a notebook: in a frame of its own, so that styles and scripts stay apart."""
    return (
        f'<iframe srcdoc="{html.escape(page, quote=True)}" style="width:100%;height:{height}px;border:0" '
        'sandbox="allow-scripts allow-downloads" title="graphoffload: one training step"></iframe>'
    )


def _as_json(content: Mapping[str, Any]) -> str:
    """JSON that cannot end the element that it stands in, whatever the names in it are."""
    text = json.dumps(content, separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _in_script(source: str) -> str:
    """A script that does not end early: inside of strings, where alone these occur, the backslash changes nothing."""
    return source.replace("</script", "<\\/script").replace("<!--", "<\\!--")
