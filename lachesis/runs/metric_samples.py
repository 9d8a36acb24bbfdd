"""Read one metric of a run for a small picture, without parsing all of its lines.

A list of runs shows a sparkline for each of them. Parsing thousands of lines with some sixty
numbers each would take most of a second, so a few places of a long file are read.
"""

import math
import os
import re
from pathlib import Path

# Files up to this size are searched whole.
MAX_WHOLE_BYTES = 1_000_000
# The places that are read of a longer one, and the bytes at each.
NUM_PLACES, PLACE_BYTES = 40, 8192
_STEP = re.compile(rb'^\{"step": (\d+),', re.MULTILINE)


def read_metric_samples(metrics: Path, name: str) -> list[tuple[int, float]]:
    """Return values of one metric by step, in order; of a long run those of a part of its steps.

    Args:
        metrics: The file `metrics.jsonl` of the run; one that does not exist has no values.
        name: The name of the metric.

    Raises:
        OSError: The file cannot be read.
    """
    try:
        with metrics.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            if size <= MAX_WHOLE_BYTES:
                file.seek(0)
                return _find_values(file.read(), name)
            values: list[tuple[int, float]] = []
            for place in range(NUM_PLACES):
                file.seek((size - PLACE_BYTES) * place // (NUM_PLACES - 1))
                values += _find_values(file.read(PLACE_BYTES), name)
    except FileNotFoundError:
        return []
    return _drop_repeated_steps(values)


def _find_values(content: bytes, name: str) -> list[tuple[int, float]]:
    """Return the values of the complete lines in a part of the file."""
    value = re.compile(rb'"' + re.escape(name.encode()) + rb'": ([-+.\deE]+)')
    values = []
    for match in _STEP.finditer(content):
        end = content.find(b"\n", match.end())
        if end < 0:
            break
        found = value.search(content, match.end(), end)
        if found is not None and math.isfinite(number := float(found[1])):
            values.append((int(match[1]), number))
    return _drop_repeated_steps(values)


def _drop_repeated_steps(values: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """Return the values without those of steps that a resumed run has made again."""
    kept: list[tuple[int, float]] = []
    for step, value in values:
        while kept and kept[-1][0] >= step:
            kept.pop()
        kept.append((step, value))
    return kept
