"""The table of docs/more_than_one_gpu.md has a row for each way that is trained here, and no other."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "more_than_one_gpu.md"
FILES = ("tensor_parallel.py", "data_parallel.py", "pipelines.py")


def test_every_way_has_a_row() -> None:
    rows = re.findall(r"^\| `(\w+)`:", PAGE.read_text(), re.MULTILINE)
    texts = [(Path(__file__).parent / name).read_text() for name in FILES]
    ways = [way for text in texts for way in re.findall(r"^def ([a-z]\w*)\(compiled: Compile\) -> Steps:", text, re.MULTILINE)]
    assert sorted(rows) == sorted(ways)
