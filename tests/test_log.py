"""The one line after each compile: on stderr, or where logging is set up; other ranks than the first say which they are."""

from __future__ import annotations

import logging

import pytest

from graphoffload.log import log, say


@pytest.mark.parametrize(
    ("rank", "start"), [(None, "graphoffload: a"), ("0", "graphoffload: a"), ("3", "graphoffload (rank 3): a")]
)
def test_a_line_names_its_rank(
    rank: str | None, start: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Eight processes write to one terminal."""
    monkeypatch.delenv("RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr(log, "level", logging.NOTSET)
    monkeypatch.setattr(log, "hasHandlers", lambda: False)
    say("a plan")
    assert capsys.readouterr().err == f"{start} plan\n"


def test_a_level_above_info_silences_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """As the docstring says."""
    monkeypatch.setattr(log, "level", logging.WARNING)
    say("a plan")
    assert capsys.readouterr().err == ""
