"""What a page shows of a run that needs a look: the curves, the step, and counted outcomes."""

import pytest

from lachesis.reporting.charts import SMALL_CHARTS
from lachesis.reporting.run_headline import (
    OutcomeRow,
    count_outcomes,
    describe_trouble,
    describe_verdict,
    find_first_bad_step,
)
from lachesis.runs.metrics import Step
from tests.harness.home import make_record

RAISED = "40% of the rollouts of the last 20 steps had no usable score, since step 3 (it raised)"
STEPS: list[Step] = [
    {"step": step, "batch/rollouts": 6, "train/percent_correct": 0.5, "rollouts/raised": 1.0}
    for step in range(1, 31)
]


def make_judged(word, *evidence):
    health = {"word": word, "evidence": list(evidence), "advice": [], "final": True}
    return make_record(run_id="aaaa0001", status="completed", health=health)


def test_outcomes_add_up_to_all_rollouts():
    rows = count_outcomes([*STEPS[:2], {"step": 3, "rollouts/invalid": 4}], group_size=4)
    assert rows[0] == OutcomeRow("the environment raised", 8, 8 / 24)
    assert [(row.name, row.count) for row in rows] == [
        ("the environment raised", 8),
        ("right", 6),
        ("scored 0 or less", 6),
        ("without a usable score", 4),
    ]
    assert sum(row.share for row in rows) == pytest.approx(1)
    assert count_outcomes([{"step": 1}], group_size=4) == []


def test_the_curve_of_the_evidence_and_its_step_are_shown():
    record = make_judged("suspect", RAISED)
    verdict = describe_verdict(record, 30, {"first": 0.1, "last": 0.5}, [])
    trouble = describe_trouble(record, verdict, SMALL_CHARTS, STEPS, group_size=4)
    assert trouble is not None
    assert [chart.name for chart in trouble.charts] == ["raised", "invalid"]
    assert (trouble.since, trouble.num_steps) == (3, 20)
    assert [row.count for row in trouble.outcomes] == [80, 60, 60]


def test_nothing_is_shown_of_a_run_that_needs_no_look():
    record = make_judged("healthy", "since step 3 the reward rises")
    verdict = describe_verdict(record, 30, {"first": 0.1, "last": 0.5}, [])
    assert describe_trouble(record, verdict, SMALL_CHARTS, STEPS, group_size=4) is None
    assert find_first_bad_step(record) is None
    broken = make_judged("broken", "it cannot be read")
    verdict = describe_verdict(broken, 0, {}, [])
    assert describe_trouble(broken, verdict, SMALL_CHARTS, [], group_size=4) is None
    assert find_first_bad_step(broken) is None
