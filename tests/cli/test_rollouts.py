"""`lachesis rollouts` shows what the model answered and why it scored so."""

import functools
import json

import pytest

from lachesis.runs.store import RunStore
from tests.harness.home import make_record, make_row, write_run


@pytest.fixture
def run(store):
    """A run of two steps with a wrong answer, an invalid one and a long one."""
    rows = [
        make_row(1, 0, 0, 1.0),
        make_row(1, 0, 1, 0.0, reason="the answer is 1", answer="7"),
        make_row(2, 1, 0, 1.0, answer="x" * 3000),
        {**make_row(2, 1, 1, 0.5, outcome="invalid", reason="the verifier failed"), "score": None},
    ]
    return write_run(store, rollouts=rows).run_id


@pytest.fixture
def printed(shown):
    return functools.partial(shown, "rollouts")


def test_the_worst_answer_is_shown_with_its_item_and_the_reason(run, printed):
    text = printed(run[:3], "--worst", "1")
    for part in (
        "step 1 · group 0, rollout 1 · score 0 · trained",
        '{"question": "0+1="}',
        "the answer is 1",
        "-0.500",
        f"run {run}: 1 of 3 rollouts that match; kept are those of steps 1 to 2",
    ):
        assert part in text, text


@pytest.mark.parametrize(
    ("words", "places"),
    [
        (["--best", "2"], [(2, 1, 0), (1, 0, 0)]),
        (["--invalid"], [(2, 1, 1)]),
        (["--step", "1"], [(1, 0, 0), (1, 0, 1)]),
        (["--step", "last", "--limit", "1"], [(2, 1, 0)]),
        (["--item", "key1"], [(2, 1, 0), (2, 1, 1)]),
    ],
)
def test_json_has_the_rollouts_that_were_asked_for(run, printed, words, places):
    answer = json.loads(printed(run, *words, "--json"))
    found = [(row["step"], row["group"], row["rollout"]) for row in answer["rollouts"]]
    assert found == places
    assert "tokens" not in answer["rollouts"][0]


def test_tokens_come_with_their_log_probabilities(run, printed):
    assert "1 2 3(-0.50)" in printed(run, "--tokens", "--limit", "1")


def test_a_long_text_is_cut_for_people_and_not_for_programs(run, printed):
    assert "(1000 more characters)" in " ".join(printed(run, "--step", "2").split())
    answer = json.loads(printed(run, "--step", "2", "--json"))
    assert len(answer["rollouts"][0]["answer"]) == 3000


def test_a_step_that_is_not_kept_is_refused(run, printed):
    assert "kept are those of steps 1 to 2" in printed(run, "--step", "9", code=1)
    assert "allowed are a training step from 1 on, and `last`" in printed(
        run, "--step", "x", code=1
    )


def test_a_run_without_rollouts_says_so(clean_environment, printed):
    RunStore(clean_environment).create(make_record(run_id="ffffffff"))
    assert "no rollouts are kept" in printed("@last")
