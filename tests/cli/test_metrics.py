"""`lachesis metrics` gives each step once, whatever a crash or a late result left in the file."""

import csv
import functools
import io
import json

import pytest

from lachesis.runs.store import RunStore
from tests.harness.home import write_run

LINES = [
    {"step": 1, "time": 10.0, "reward/mean": 0.1},
    {"step": 2, "time": 11.0, "reward/mean": 0.2, "train/loss": float("nan")},
    {"step": 3, "time": 12.0, "reward/mean": 0.9},
    # The run was resumed from step 1, and a result of step 2 came late.
    {"step": 2, "time": 20.0, "reward/mean": 0.3, "train/loss": float("nan")},
    {"step": 3, "time": 21.0, "reward/mean": 0.4},
    {"step": 3, "time": 21.0, "reward/mean": 0.4, "eval/percent_correct": 0.5},
]


@pytest.fixture
def run(store):
    record = write_run(store)
    store.dir(record.run_id).metrics.write_text("".join(json.dumps(one) + "\n" for one in LINES))
    return record.run_id


@pytest.fixture
def printed(shown):
    return functools.partial(shown, "metrics")


def test_csv_has_each_step_once_and_in_order(run, printed):
    rows = list(csv.reader(io.StringIO(printed(run, "--csv"))))
    assert rows == [
        ["step", "time", "eval/percent_correct", "reward/mean", "train/loss"],
        ["1", "10.0", "", "0.1", ""],
        ["2", "20.0", "", "0.3", ""],
        ["3", "21.0", "0.5", "0.4", ""],
    ]


def test_the_table_has_the_main_metrics_that_the_run_has(run, printed):
    lines = [line.split() for line in printed(run).splitlines() if line.strip()]
    assert lines == [
        ["step", "reward", "held", "out"],
        ["1", "0.100"],
        ["2", "0.300"],
        ["3", "0.400", "0.500"],
    ]
    answer = json.loads(printed(run, "--json"))
    assert (answer["count"], answer["steps"][1]["reward/mean"]) == (3, 0.3)


def test_a_run_without_steps(run, clean_environment, printed):
    RunStore(clean_environment).dir(run).metrics.unlink()
    assert "has no steps yet" in printed(run)
    assert printed(run, "--csv") == "step,time\n"
