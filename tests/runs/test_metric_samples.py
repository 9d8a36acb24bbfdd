"""Values of one metric for a sparkline, of short and of very long runs."""

import itertools
import json

import pytest

from lachesis.runs.metric_samples import MAX_WHOLE_BYTES, read_metric_samples
from lachesis.runs.metrics import MetricsFile

NAME = "reward/mean"


def write_lines(file, steps, padding=0):
    with file.open("a") as lines:
        for step in steps:
            line = {"step": step, "time": 1.5, NAME: step / 1000, "text": "x" * padding}
            lines.write(json.dumps(line) + "\n")


def test_a_short_run_has_all_values(tmp_path):
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    for step, reward in enumerate([0.25, -1e-07, 3.0], 1):
        metrics.append(step, {"reward/std": 1.0, NAME: reward})
    assert read_metric_samples(metrics.path, NAME) == [(1, 0.25), (2, -1e-07), (3, 3.0)]


def test_a_long_run_has_values_of_all_its_parts(tmp_path):
    file = tmp_path / "metrics.jsonl"
    write_lines(file, range(1, 3001), padding=2000)
    assert file.stat().st_size > 4 * MAX_WHOLE_BYTES
    samples = read_metric_samples(file, NAME)
    assert samples[0] == (1, 0.001)
    assert samples[-1] == (3000, 3.0)
    assert all(value == step / 1000 for step, value in samples)
    steps = [step for step, _ in samples]
    assert steps == sorted(set(steps))
    assert max(later - step for step, later in itertools.pairwise(steps)) < 80


def test_steps_that_were_made_again_count_once(tmp_path):
    file = tmp_path / "metrics.jsonl"
    write_lines(file, range(1, 6))
    write_lines(file, range(3, 5))
    assert [step for step, _ in read_metric_samples(file, NAME)] == [1, 2, 3, 4]


@pytest.mark.parametrize("content", ["", '{"step": 1, "reward/mean": 0.5', '{"step": 1}\nnull\n'])
def test_lines_without_a_value_are_left_out(tmp_path, content):
    file = tmp_path / "metrics.jsonl"
    file.write_text(content)
    assert read_metric_samples(file, NAME) == []
    assert read_metric_samples(tmp_path / "missing.jsonl", NAME) == []
    file.write_text('{"step": 1, "reward/mean": NaN}\n{"step": 2, "reward/mean": null}\n')
    assert read_metric_samples(file, NAME) == []
