"""Recorded instances of real models: the recording is the Program, and budgets near the least behave."""

from __future__ import annotations

import pytest

from tests.plan import recordings
from tests.plan.instances import stack


def test_a_recording_is_the_program_it_was_made_from() -> None:
    program = stack(4)
    assert recordings.from_json(recordings.to_json(program)) == program


@pytest.mark.parametrize("name", recordings.names())
def test_recordings_can_be_read(name: str) -> None:
    program = recordings.load(name)
    assert recordings.from_json(recordings.to_json(program)) == program
    assert len(program.candidates) > 10


def test_what_the_model_returns_is_not_won_by_recomputing_it() -> None:
    """Keys and values of a cache are saved and returned: the caller has them, whatever the plan makes of them."""
    plain, cached = recordings.load("llama8l"), recordings.load("llama8l-cache")
    without_bytes = [c for c in cached.candidates if not c.nbytes]
    assert len(without_bytes) == 16 + len([c for c in plain.candidates if not c.nbytes]), "two of each layer, and the logits"
    held = {buffer.name: buffer for buffer in cached.buffers if buffer.name in {c.name for c in without_bytes}}
    assert len(held) == len(without_bytes)
    for candidate in without_bytes:
        buffer = held[candidate.name]
        assert (buffer.nbytes > 0, buffer.first) == (True, candidate.produced_at)
        assert buffer.last >= len(cached.forward) + max(candidate.backward_uses, default=-1)
