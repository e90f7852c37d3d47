"""What hides costs nothing, and an op costs the host little."""

from __future__ import annotations

import statistics

from gpu.midsize import Measured

HOST_US = 40.0
"""Of host time for one op, far above the 15 us it should cost, far below the 100 us of careless Python. Machines are shared."""


def test_offload_that_hides_is_nearly_free(measured: Measured) -> None:
    """The lower end of the ratio's interval: copies slow kernels beside them by up to 5 %."""
    assert measured.row.ratio_interval is not None
    assert measured.row.ratio_interval[0] <= 1.03, (measured.row.ratio, measured.row.ratio_interval)


def test_host_time_of_an_op(measured: Measured) -> None:
    """Extra host time of a step, divided by its ops."""
    extra_ms = statistics.median(s.host_ms for s in measured.row.samples) - statistics.median(
        s.host_ms for s in measured.row.baseline
    )
    assert extra_ms * 1e3 <= HOST_US * measured.ops, (extra_ms, measured.ops)
