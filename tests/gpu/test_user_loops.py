"""What a user runs: whole training loops under plain torch.compile and under graphoffload, with no option but a budget.

Each loop runs in a process of its own (user_loops.py), so that its peaks are, and the settings of compiler and allocator.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from forked import python_path, run_script
from gpu.user_loops import CASES
from gpu.user_runs import SKIPPED

TESTS = Path(__file__).resolve().parent.parent
LIMIT_S = 420.0  # alone on a GPU: one to three minutes, of which most are three compiles
OF_THE_TESTS = ("TORCHINDUCTOR_COMPILE_THREADS", "OMP_NUM_THREADS", "CUBLAS_WORKSPACE_CONFIG")
"""What other tests set, and users leave as it is."""


def as_users() -> dict[str, str]:
    """An environment with nothing set but paths and caches."""
    kept = {name: value for name, value in os.environ.items() if name not in OF_THE_TESTS}
    return {**kept, "PYTHONPATH": os.pathsep.join([str(TESTS), python_path()]), "HF_HUB_OFFLINE": "1"}


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_a_loop_within_a_budget(case: str) -> None:
    """Losses and gradients as under plain torch.compile, and a peak that is no higher than asked."""
    script = TESTS / "gpu" / "user_loops.py"
    try:
        done = run_script(script, case, folder=TESTS.parent, environment=as_users(), limit_s=LIMIT_S)
    except subprocess.TimeoutExpired as late:
        printed = [
            text.decode(errors="replace") if isinstance(text, bytes) else text or "" for text in (late.stdout, late.stderr)
        ]
        pytest.fail(f"{case} takes longer than {LIMIT_S:.0f} s:\n" + "\n".join(printed))
    print(done.stdout, done.stderr, sep="\n")
    if done.returncode == SKIPPED:
        pytest.skip(done.stdout.strip())
    assert done.returncode == 0, f"{case}:\n{done.stdout}\n{done.stderr}"
