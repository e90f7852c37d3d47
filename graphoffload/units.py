"""Sizes in and out: the one place that reads "40GiB" and the one that writes it."""

from __future__ import annotations

import re
from numbers import Real

from graphoffload.errors import ConfigError

_FACTORS = {
    "": 1, "b": 1,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([a-zA-Z]*|%)\s*")


def parse_size(value: int | float | str, *, field: str, whole_bytes: int | None = None) -> int:
    """Bytes of a size as a user writes it: an int, "40GiB" (binary), "40GB" (decimal) or "80%" of `whole_bytes`.

    Raises:
        ConfigError: `value` does not parse, is negative, or is a percentage of something unknown. `field` names it.
    """
    forms = 'an int of bytes, "40GiB", "40GB" (decimal) or "80%" (of the device)'
    if isinstance(value, bool) or not isinstance(value, (Real, str)):
        raise ConfigError(f"{field}={value!r} is a {type(value).__name__}; a size is {forms}.")
    if not isinstance(value, str):
        if value < 0 or value != value or value == float("inf"):
            raise ConfigError(f"{field}={value!r} is no size; a size is {forms}.")
        if 0 < value < 1:
            raise ConfigError(
                f'{field}={value!r} is less than a byte; write a share as "{100 * float(value):g}%"; a size is {forms}.'
            )
        return int(value)
    match = _SIZE.fullmatch(value)
    if match is None:
        raise ConfigError(f"{field}={value!r} does not parse as a size; a size is {forms}.")
    number, unit = float(match[1]), match[2].lower()
    if unit == "%":
        if number > 100:
            raise ConfigError(f"{field}={value!r} is more than 100 %; a size is {forms}.")
        if whole_bytes is None:
            raise ConfigError(
                f'{field}={value!r} is a share of a device whose memory is unknown here; give bytes, such as "40GiB".'
            )
        return int(whole_bytes * number / 100)
    if unit not in _FACTORS:
        raise ConfigError(
            f"{field}={value!r} has the unknown unit {match[2]!r}; known: B, KB, MB, GB, TB, KiB, MiB, GiB, TiB, %."
        )
    return int(number * _FACTORS[unit])


def format_bytes(nbytes: int | None) -> str:
    """Bytes for people: "1.50 GiB", "24 MiB", "512 B"; "symbolic" for None."""
    if nbytes is None:
        return "symbolic"
    sign, size = ("-" if nbytes < 0 else ""), abs(nbytes)
    unit, factor = unit_of(size)
    amount = size / factor
    if factor == 1:
        return f"{sign}{size} B"
    return f"{sign}{amount:.2f} {unit}" if amount < 10 else f"{sign}{amount:.1f} {unit}"


def unit_of(nbytes: int) -> tuple[str, int]:
    """The unit that so many bytes are printed in, and how many bytes it has: for an axis."""
    units = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))
    return next(((unit, factor) for unit, factor in units if nbytes >= factor), ("B", 1))


def coarse_size(nbytes: int | None) -> int | None:
    """A size to the nearest GiB, for keys that must not change with every byte; None for None."""
    return None if nbytes is None else round(nbytes / _FACTORS["gib"]) * _FACTORS["gib"]


def per_gib(amount: float, nbytes: int) -> float:
    """What of `amount` falls to each GiB of `nbytes`."""
    return amount / nbytes * _FACTORS["gib"]
