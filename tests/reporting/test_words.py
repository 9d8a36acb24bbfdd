"""What the pages say: verdicts, comparisons, numbers, and nothing that the data does not allow."""

from datetime import UTC, datetime, timedelta

import pytest

from lachesis.base.formatting import (
    count_in_words,
    format_decimal,
    format_moment,
    format_setting,
    join_words,
)
from lachesis.reporting.comparison import ComparedRun, Comparison, write_compare_lead
from lachesis.reporting.run_headline import describe_verdict
from lachesis.reporting.run_summary import RunSummary
from lachesis.reporting.verdict_marks import choose_mark, needs_a_look
from lachesis.runs.held_out_results import to_point
from tests.harness.home import make_record

REWARD = {"first": 0.1, "last": 0.9}


def make_point(step, share, items=20):
    metrics = {"eval/percent_correct": share}
    point = to_point(metrics | ({} if items is None else {"eval/items": items}), step)
    assert point is not None
    return point


def make_judged(word, **changes):
    health = {"word": word, "evidence": ["the mean reward fell"], "advice": ["go back"]}
    return make_record(**{"status": "completed", "health": health if word else None, **changes})


@pytest.mark.parametrize(
    ("after", "words"),
    [
        (0.95, "held-out accuracy from 15 % to 95 %."),
        (0.30, "held-out accuracy from 15 % to 30 %, which 20 items cannot tell apart."),
        (None, "no held-out result before and after says whether it generalizes."),
    ],
)
def test_a_sentence_says_no_more_than_the_intervals_allow(after, words):
    curve = [make_point(0, 0.15)] + ([] if after is None else [make_point(9, after)])
    verdict = describe_verdict(make_judged("healthy"), 9, REWARD, curve)
    assert verdict.lead == "It learned."
    assert verdict.lead_rest.startswith("In 9 steps the reward rose from 0.100 to 0.900")
    assert verdict.lead_rest.endswith(words)
    assert verdict.findings[0].text == "The mean reward fell."
    assert verdict.findings[0].chart == "reward"
    assert verdict.advice == ["Go back."]


@pytest.mark.parametrize(
    ("record", "word", "lead"),
    [
        (make_judged("healthy", status="running"), "healthy", "It is learning."),
        (make_judged("suspect"), "suspect", "Have a look."),
        (make_judged("not learning"), "not learning", "It has not learned."),
        (make_judged("broken"), "broken", "It is broken."),
        (make_judged(None), "unknown", "It ended before it could be judged."),
        (make_judged(None, status="failed", error="no\ndetails"), "failed", "It failed."),
        (make_judged(None, status="running"), "too early", "Too early to tell."),
    ],
)
def test_each_verdict_begins_in_its_own_words(record, word, lead):
    verdict = describe_verdict(record, 9, REWARD, [])
    assert (verdict.mark.word, verdict.lead) == (word, lead)
    alarming = ("suspect", "not learning", "broken", "failed")
    assert needs_a_look(record) == (word in alarming)


def test_a_run_that_stands_still_is_not_called_healthy():
    stall = {"part": "trainer", "since": "12:00", "evidence": "no step"}
    record = make_record(status="running", health={"word": "healthy", "stalled": stall})
    verdict = describe_verdict(record, 9, REWARD, [])
    assert choose_mark(record).word == "stalled"
    assert verdict.lead == "It stands still."
    assert "stalled in trainer" in verdict.lead_rest.lower()


def test_no_sentence_names_a_folder_of_this_machine():
    text = "it blocks in score() at /home/me/tasks/sums.py:88; see https://x.org/a/b.html, 1/2.5"
    stall = {"part": "environment", "since": "2026-01-01T00:00:00+00:00", "evidence": text}
    record = make_record(status="running", health={"word": "healthy", "stalled": stall})
    rest = describe_verdict(record, 3, {"first": 0.1, "last": 0.2}, []).lead_rest
    assert "in score() at sums.py:88; see https://x.org/a/b.html, 1/2.5" in rest


def test_a_reward_that_fell_is_not_said_to_have_risen():
    verdict = describe_verdict(make_judged("healthy"), 1, {"first": 0.5, "last": 0.4}, [])
    assert verdict.lead_rest.startswith("In one step the reward fell from 0.500 to 0.400;")
    verdict = describe_verdict(make_judged("healthy"), 0, {}, [])
    assert verdict.lead_rest == ""


# --- comparisons


def make_run(run_id, share, items=20, **settings):
    summary = RunSummary(
        record=make_record(run_id=run_id, environment=settings.pop("environment", "sums")),
        step=9,
        reward=REWARD,
        reward_steps=5,
        held_out=None,
        held_out_before=None,
        duration_s=1.0,
        tokens=0,
        cost_usd=None,
        settings={"tinker.learning_rate": 0.001, **settings},
    )
    return ComparedRun(summary, [], [] if share is None else [make_point(9, share, items)])


def compare(*runs):
    return " ".join(write_compare_lead(Comparison(list(runs))))


def test_the_best_run_is_named_only_if_the_items_can_tell():
    assert compare(make_run("a", 0.95), make_run("b", 0.1)) == (
        "A is best: 0.950 held out, above all others. B is 0.85 behind with the same settings."
    )
    assert compare(make_run("a", 0.6), make_run("b", 0.7, **{"env.group_size": 4})) == (
        "A and B are best, and 20 items cannot tell them apart: 0.600 and 0.700 held out, and no "
        "setting differs."
    )
    slow = make_run("c", 0.1, **{"tinker.learning_rate": 0.00004})
    sentence = compare(slow, make_run("a", 0.9), make_run("b", 0.85))
    assert sentence.startswith("B and C are best, and 20 items cannot tell them apart: 0.900 and")
    assert sentence.endswith("A is 0.80 behind, with learning_rate 0.00004.")


def test_more_items_tell_more():
    assert compare(make_run("a", 0.6), make_run("b", 0.7)).startswith("A and B are best")
    many = compare(make_run("a", 0.6, 2000), make_run("b", 0.7, 2000))
    assert many.startswith("B is best: 0.700 held out, above all others. A is 0.10 behind")


def test_runs_without_results_are_not_ranked():
    assert compare(make_run("a", 0.6), make_run("b", None)) == (
        "None can be called best. 1 of 2 runs has a held-out result of trained weights."
    )
    unlike = make_run("b", 0.9, environment="words")
    assert compare(make_run("a", 0.6), unlike).startswith("These runs cannot be compared.")
    text = compare(make_run("a", 0.9), make_run("b", 0.1), make_run("c", None))
    assert text.endswith("1 of the runs has no held-out result.")


# --- numbers


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.00004, "0.00004"), (1e-9, "1e−09"), (2.0, "2"), (-0.5, "−0.5"), (True, "true"),
        (None, "none"), (2500, "2,500"), ("auto", "auto"), (0.1 + 0.2, "0.3"),
    ],
)  # fmt: skip
def test_settings_are_written_as_a_person_would_type_them(value, text):
    assert format_setting(value) == text


def test_moments_are_said_as_a_person_says_them():
    now = datetime(2026, 3, 10, 12, 0, tzinfo=UTC).astimezone()
    for age, words in (
        (timedelta(seconds=5), "just now"),
        (timedelta(minutes=30), "today, "),
        (timedelta(days=1), "yesterday, "),
        (timedelta(days=8), "2 Mar, "),
        (timedelta(days=400), "3 Feb 2025, "),
    ):
        assert format_moment((now - age).isoformat(), now).startswith(words)


def test_counts_and_lists():
    assert [count_in_words(count) for count in (0, 3, 10, 1200)] == ["no", "three", "ten", "1,200"]
    assert count_in_words(2, is_first=True) == "Two"
    assert [join_words(list(words)) for words in ("", "A", "AB", "ABC")] == [
        "", "A", "A and B", "A, B and C"
    ]  # fmt: skip
    assert [format_decimal(value) for value in (3e20, 0.0, 12.5)] == ["3e+20", "0", "12.5"]
