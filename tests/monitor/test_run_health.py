"""The judgement is right on simulated runs: a smaller round of `bench/learning_judgement.py`, with
the same bounds.
"""

import importlib.util
import sys
from pathlib import Path

import pytest

RUNS = 48
"""Per kind; one or none of them may be wrong where 2 % may."""
LENGTHS = (100, 200, 300, 500, 1000)


@pytest.fixture(scope="module")
def bench():
    file = Path(__file__).parents[2] / "bench" / "learning_judgement.py"
    spec = importlib.util.spec_from_file_location("bench_judgement", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("kind", ["rising", "late take-off", "solved"])
def test_a_healthy_run_is_never_called_worse_than_suspect(bench, kind):
    tally = bench.simulate(kind, RUNS, lengths=LENGTHS)
    assert tally.worse <= 0.02 * RUNS
    assert tally.missing_at_end == 0, "no healthy run ends as one that does not learn"


def test_a_flat_run_is_called_not_learning_before_its_half(bench):
    tally = bench.simulate("flat", RUNS, lengths=LENGTHS)
    assert tally.missing_by_half >= 0.95 * RUNS
    assert tally.too_soon == 0


def test_a_collapse_is_noticed_within_a_fifth_of_the_run(bench):
    tally = bench.simulate("collapsing", RUNS, lengths=LENGTHS)
    assert sum(delay <= 0.25 for delay in tally.delays) >= 0.95 * RUNS
