"""The metrics file, of which the last steps are read without the rest."""

from __future__ import annotations

from pathlib import Path

import pytest

from lachesis.runs.metrics import MetricsFile


@pytest.mark.parametrize("num_values", [1, 300])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_the_last_steps_are_read_however_long_their_lines_are(
    tmp_path: Path, num_values: int, count: int
) -> None:
    """A line of four environments with an evaluation has more than 4,000 bytes."""
    file = MetricsFile(tmp_path / "metrics.jsonl")
    assert file.tail(count) == []
    for step in range(1, 5):
        file.append(
            step, {f"environments/another_one/eval/value_{i}": 1.0 for i in range(num_values)}
        )
    steps = [line["step"] for line in file.tail(count)]
    assert steps[-min(count, 4) :] == list(range(1, 5))[-count:]
