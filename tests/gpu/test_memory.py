"""What is offloaded is really free: the allocator's peak falls by it."""

from __future__ import annotations

from graphoffload.bench.midsize import Measured


def test_peak_falls_by_what_was_offloaded(measured: Measured) -> None:
    """At least 99.8 % of the bytes copied; nothing is left behind from step to step."""
    saved = measured.keep_peak_bytes - (measured.row.peak_bytes or 0)
    assert measured.copied_bytes >= 10**9
    assert saved >= 0.998 * measured.copied_bytes, (saved, measured.copied_bytes)
    assert measured.row.static_growth_bytes == 0


def test_gradients_are_those_of_keep_all(measured: Measured) -> None:
    """In each of 20 steps no further off than bfloat16 rounding takes eager: other fusions round otherwise."""
    assert measured.row.gradient_error is not None
    assert measured.row.gradient_error <= max(1e-3, measured.eager_error), measured.eager_error


def test_gradients_are_those_of_synchronous_copies(measured: Measured) -> None:
    """The same graphs: nothing but the order in which kernels add may differ, as between two steps of keep-all."""
    assert measured.twin_error <= max(1e-6, 2 * measured.repeat_error), measured.repeat_error
