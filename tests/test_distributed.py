"""Two processes train together (gloo on the CPU): gradients are keep-all's, host memory is shared, caches stay whole.

DDP and FSDP2 see compiled blocks as any other modules. Steps that ranks plan together: test_ranks_agree.py. On two
GPUs: tests/gpu/test_two_gpus.py.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

if not dist.is_available() or not dist.is_gloo_available():
    pytest.skip("this torch is built without torch.distributed or gloo", allow_module_level=True)

from forked import server
from made_up_gpus import made_up_gpus
from ranks import CASES, CPU, Place, check_case, check_profile, check_surroundings, in_a_group, spawned, train

from graphoffload.cli.command_line import main
from graphoffload.facts.plan import Decision, Plan
from graphoffload.hardware.measurement import cached
from graphoffload.hardware.profile import PROFILES
from graphoffload.runtime import registry


@pytest.mark.parametrize("inner", ["aot_eager", pytest.param("inductor", marks=pytest.mark.long)])
def test_gradients_are_those_of_keep_all(tmp_path: Path, inner: str) -> None:
    """On both ranks, every gradient; under Inductor to rounding, for it fuses what is kept otherwise than what is copied.

    Beside it: no warning, half of the host memory for each, a link that both measured at the same time.
    """
    server()
    found = spawned(train, tmp_path, CPU, inner, method="forkserver")
    for case in CASES:
        check_case(found, case, CPU, inner)
    check_surroundings(found)
    check_profile(found, CPU)


def hardware_command(rank: int, port: int, folder: str, place: Place) -> None:
    """`torchrun --nproc-per-node 2 -m graphoffload hardware`, twice."""
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE="2",
    )  # fmt: skip
    printed, statuses = [], []
    with made_up_gpus(Path(folder), 40e9 - 4e9 * rank) as asked:
        for _ in range(2):
            with contextlib.redirect_stdout(io.StringIO()) as out:
                statuses.append(main(["hardware"]))
            printed.append(out.getvalue())
    Path(folder, f"{rank}.json").write_text(json.dumps({"asked": asked, "printed": printed, "statuses": statuses}))


def test_the_command_measures_with_all_ranks(tmp_path: Path) -> None:
    """Each its own GPU; the first prints the slowest figures, and where they are kept."""
    server()
    first, second = spawned(hardware_command, tmp_path, CPU, method="forkserver")
    assert first["statuses"] == second["statuses"] == [0, 0]
    assert (first["asked"], second["asked"]) == ([0], [1])
    assert second["printed"] == ["", ""]
    one, again = first["printed"]
    assert one == again
    assert "D2H                      36.0 GB/s       measured on this device" in one
    assert "link measured by         2 local ranks   all at once" in one
    assert "  2       D2H 36.0 GB/s, H2D 55.5 GB/s, both ways at once 90.0 GB/s" in one
    assert "-2-ranks.json; delete it to measure again" in one.splitlines()[-1]


def write_and_read(rank: int, port: int, folder: str, place: Place) -> None:
    """Both ranks write plans and profiles under the same names and read them again, many times."""
    os.environ["GRAPHOFFLOAD_CACHE_DIR"] = folder
    in_a_group(rank, port, place)
    broken = measured = 0

    def measure() -> Any:
        nonlocal measured
        measured += 1
        return PROFILES["h200-sxm"]

    for round in range(100):
        plan = Plan(key=f"key{round}", graph="g" * (1 + 2000 * rank), decisions=(Decision("t", "keep", "why" * 500),))
        dist.barrier()
        registry._write(plan, f"key{round}")
        read = registry.stored(f"key{round}")
        broken += read is None or read.decisions != plan.decisions or len(read.graph) not in (1, 2001)
        if round % 10 == 0:
            broken += cached(Path(folder) / f"profile{round}.json", measure) != PROFILES["h200-sxm"]
    Path(folder, f"{rank}.json").write_text(json.dumps({"broken": broken, "measured": measured}))
    dist.destroy_process_group()


def test_caches_used_by_two_processes_at_once(tmp_path: Path) -> None:
    """A reader gets one of the two plans, whole; a profile is measured by one process, and the other waits for it."""
    server()
    found = spawned(write_and_read, tmp_path, CPU, method="forkserver")
    assert [seen["broken"] for seen in found] == [0, 0]
    assert sum(seen["measured"] for seen in found) == 10
