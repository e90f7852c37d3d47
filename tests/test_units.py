"""Sizes: every form a user may write, and what is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphoffload.errors import ConfigError
from graphoffload.units import format_bytes, parse_size

UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


@pytest.mark.parametrize(
    ("value", "nbytes"),
    [
        (0, 0),
        (7, 7),
        (7.9, 7),
        ("12", 12),
        ("40GiB", 40 * 2**30),
        ("40GB", 40 * 10**9),
        ("1.5 MiB", 3 * 2**19),
        (" .5kib ", 512),
    ],
)
def test_parse_size(value: int | float | str, nbytes: int) -> None:
    """Binary, decimal, fractions, spaces, any case."""
    assert parse_size(value, field="f") == nbytes


def test_a_share_of_the_device() -> None:
    """Percentages need to know of what."""
    assert parse_size("80%", field="f", whole_bytes=1000) == 800
    assert parse_size("100 %", field="f", whole_bytes=7) == 7


@given(st.integers(0, 10**6), st.sampled_from(sorted(UNITS)), st.booleans(), st.sampled_from(["", " "]))
def test_whole_numbers_are_exact(number: int, unit: str, lower: bool, space: str) -> None:
    """No rounding in number x unit."""
    assert parse_size(f"{number}{space}{unit.lower() if lower else unit}", field="f") == number * UNITS[unit]


@given(st.text(max_size=12))
def test_any_text_is_a_size_or_a_config_error(text: str) -> None:
    """Never another exception, never a negative size; the message names field and value."""
    message = f"device_budget={text!r}"
    try:
        nbytes = parse_size(text, field="device_budget", whole_bytes=2**30)
    except ConfigError as error:
        message, nbytes = str(error), 0
    assert nbytes >= 0
    assert f"device_budget={text!r}" in message


@given(st.integers(0, 2**50))
def test_what_is_printed_reads_back_within_its_digits(nbytes: int) -> None:
    """Three significant digits below 10, one decimal above."""
    back = parse_size(format_bytes(nbytes), field="f")
    assert abs(back - nbytes) <= max(0.006 * nbytes, 0)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (None, "symbolic"),
        (512, "512 B"),
        (3 * 2**19, "1.50 MiB"),
        (24 * 2**20, "24.0 MiB"),
        (-(2**30), "-1.00 GiB"),
        (0, "0 B"),
    ],
)
def test_format_bytes(nbytes: int | None, text: str) -> None:
    """For people."""
    assert format_bytes(nbytes) == text


@pytest.mark.parametrize(
    ("value", "part"),
    [
        ("40 Gigs", "unknown unit 'Gigs'"),
        ("40 GiB!", "does not parse"),
        ("", "does not parse"),
        ("-1", "does not parse"),
        (-1, "no size"),
        (float("nan"), "no size"),
        (float("inf"), "no size"),
        (True, "bool"),
        (None, "NoneType"),
        (3j, "complex"),
        (0.8, '"80%"'),
        ("101%", "more than 100 %"),
        ("50%", "unknown here; give bytes"),
    ],
)
def test_what_is_no_size(value: object, part: str) -> None:
    """Which field, which value, and a form that works."""
    with pytest.raises(ConfigError) as info:
        parse_size(value, field="host_budget")  # type: ignore[arg-type]
    assert part in str(info.value)
    assert f"host_budget={value!r}" in str(info.value)
    assert "GiB" in str(info.value)
