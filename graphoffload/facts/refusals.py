"""Refusals: why a saved activation must not be offloaded or recomputed, with a code, a text and a remedy.

    why = Refusal.BELOW_MIN_BYTES.because(nbytes="4 KiB", least="1 MiB")
    why                    "4 KiB is less than min_tensor_bytes=1 MiB"       shown in the table of a plan, and stored with it
    why.refusal.remedy     "lower min_tensor_bytes"                          named in a warning

Code tests `why.refusal`; the text is for people. A plan that was read from disk has only the texts, since all its decisions are
made.
"""

from __future__ import annotations

import enum
import re

_BELOW = re.compile(r"is less than min_tensor_bytes=(\S+ \w*B)\b")


class Refusal(enum.Enum):
    """A cause, as (text, remedy). The remedy is a change that lets the activation be offloaded; "" if there is none."""

    # Not offloaded: the user's limits
    BELOW_MIN_BYTES = ("{nbytes} is less than min_tensor_bytes={least}", "lower min_tensor_bytes")
    OUTSIDE_MODULES = ("outside offload_modules={modules}", "widen offload_modules")
    BEYOND_FRACTION = ("beyond offload_fraction={fraction:g} of the eligible bytes", "raise offload_fraction")
    TAGGED = ("tag {tag}", "")
    TAGGED_TO_RECOMPUTE = ("tag MUST_RECOMPUTE", "change the tag to MUST_CPU_OFFLOAD")
    # Not offloaded: its memory
    COPY_OF_CALLERS = (
        "is a copy of an input or output, which a compiler may leave out: then it is the caller's own memory",
        "offload what is computed from it",
    )
    SHARES_WITH_OUTPUT = (
        "shares memory with an output of the model",
        "do not return it from what is compiled: its memory is the caller's",
    )
    SEVERAL_DTYPES = (
        "saved views of one storage have different dtypes",
        "clone the view of the other dtype in forward, so that each has memory of its own",
    )
    LAZY_BITS = (
        "is a lazy conjugate or negative: its bits are not its values",
        "call resolve_conj() or resolve_neg() on it in forward",
    )
    NOT_COVERED = (
        "several saved views, and no value covers their storage",
        "clone the views in forward, so that each has memory of its own",
    )
    NOT_PLAIN = ("is a {type}, not a plain tensor", "compute with plain tensors there (a DTensor's to_local())")
    NO_MEMORY = ("has no memory (meta device)", "move the model to a device with memory")
    EMPTY = ("is empty", "")
    COLLECTIVE = ("is saved before the wait for the collective that writes it", "offload what is computed from it")
    RANDOM_STATE = ("is random-number state", "")
    UNKNOWN_SIZE = (
        "its symbolic size {symbols} is not known in backward",
        "compile with dynamic=False, so that its size is a number",
    )
    # Not recomputed
    READS_WRITTEN = ("its recomputation reads {name}, which forward writes to", "write to a copy in forward")
    READS_CALLERS = ("its recomputation reads {name}, {kind} that the caller may write to before backward", "")
    COMPARED_BY_BITS = ("its recomputation runs {target} again, by whose bits backward decides or compares", "")
    DECIDES_AGAIN = ("its recomputation decides again ({target}), where other last bits could decide otherwise", "")
    LOOKED_AT = ("backward decides or compares by its bits ({target}), and they could be others", "")
    UNKNOWN_EFFECTS = ("its recomputation runs {target}, whose effects are unknown", "")
    COLLECTIVE_AGAIN = ("its recomputation runs {target}, a collective, which every other rank would have to run again too", "")
    WRITES = ("its recomputation runs {target}, which writes to its arguments", "")
    UPDATES_STATISTICS = ("its recomputation runs {target}, which updates running statistics", "")
    ATTENTION = (
        "its recomputation runs {target}, which costs as much as the products around it and may draw random numbers",
        "",
    )
    RANDOM = ("its recomputation draws random numbers ({target})", "")
    SAVED_ALL_THE_SAME = ("torch's partitioner saves it, though it was to be recomputed", "")

    @property
    def remedy(self) -> str:
        """The user's change that helps; "" if there is none."""
        return self.value[1]

    def because(self, **values: object) -> Why:
        """The text with these values, as a Why of this refusal."""
        return Why(self.value[0].format(**values), self)


class Why(str):
    """The text of a refusal; `refusal` is None for a text without a code."""

    refusal: Refusal | None

    def __new__(cls, text: str, refusal: Refusal | None = None) -> Why:
        """A Why of this text."""
        why = super().__new__(cls, text)
        why.refusal = refusal
        return why


def refusal_of(text: str) -> Refusal | None:
    """The code of a reason's text; None for any other text."""
    return text.refusal if isinstance(text, Why) else None


def least_of(reason: str) -> str:
    """The bound that a plan's reason names, such as "1.00 MiB", where the tensor was below min_tensor_bytes; else ""."""
    found = _BELOW.search(reason)
    return found[1] if found else ""
