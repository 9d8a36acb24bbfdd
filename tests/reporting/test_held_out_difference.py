"""Two held-out results are told apart by their items, one by one where the answers were kept."""

import json

import pytest

from lachesis.base.confidence_intervals import paired_interval
from lachesis.reporting.held_out_difference import compare_results, read_item_shares
from lachesis.runs.folder import RunDir
from lachesis.runs.held_out_results import HeldOutPoint, compute_interval


def make_point(step, share, items):
    interval = compute_interval(share, items)
    return HeldOutPoint(step=step, percent_correct=share, **interval)  # type: ignore[arg-type]


def make_shares(num_right, num_items):
    return {(f"item {item}", None): float(item < num_right) for item in range(num_items)}


@pytest.mark.parametrize(
    ("before", "after", "items", "is_seen"),
    [(0.5, 0.65, 100, True), (0.3, 0.45, 100, True), (0.5, 0.7, 60, True), (0.2, 0.4, 60, True),
     (0.5, 0.6, 100, False), (0.65, 0.5, 100, True), (0.5, 0.5, 100, False)],
)  # fmt: skip
def test_overlapping_intervals_may_still_differ(before, after, items, is_seen):
    change = compare_results(make_point(0, before, items), make_point(9, after, items))
    assert (change.is_seen, change.is_paired) == (is_seen, False)
    assert change.value == pytest.approx(after - before)


def test_the_same_items_show_smaller_differences():
    """Six of 100 items more, and none less: a difference that two other samples would not show."""
    first, second = make_point(0, 0.5, 100), make_point(9, 0.56, 100)
    assert not compare_results(first, second).is_seen
    change = compare_results(first, second, make_shares(50, 100), make_shares(56, 100))
    assert change.is_paired
    assert change.is_seen
    assert change.describe() == "0.060 (0.013 to 0.107)"
    back = compare_results(second, first, make_shares(56, 100), make_shares(50, 100))
    assert back.describe() == "−0.060 (−0.107 to −0.013)"


def test_answers_that_are_not_those_of_the_results_are_not_compared():
    first, second = make_point(0, 0.5, 100), make_point(9, 0.56, 100)
    for shares in (make_shares(56, 99), make_shares(70, 100), {}):
        assert not compare_results(first, second, make_shares(50, 100), shares).is_paired


def test_without_a_number_of_items_nothing_is_told_apart():
    change = compare_results(make_point(0, 0.1, None), make_point(9, 0.9, 20))
    assert (change.is_seen, change.describe()) == (False, "0.800")


def test_the_interval_of_pairs_is_student_s():
    """The quantiles of t for 9 and 99 degrees of freedom are 2.262 and 1.984."""
    for num_items, quantile in ((10, 2.262), (100, 1.984)):
        differences = [1.0, -1.0] * (num_items // 2)
        spread = (num_items / (num_items - 1)) ** 0.5
        interval = paired_interval(differences)
        assert interval is not None
        assert interval[1] == pytest.approx(quantile * spread / num_items**0.5, rel=1e-3)
    assert paired_interval([1.0] * 50) is None, "no spread, no interval"
    assert paired_interval([0.0, 1.0] * 4) is None


def test_equal_questions_with_unlike_answers_are_two_items(tmp_path):
    run_dir = RunDir(tmp_path, "0123abcd")
    for name, score in (("step-0", 0.0), ("step-9", 1.0)):
        folder = run_dir.evaluation / name
        folder.mkdir(parents=True)
        samples = [{"question": "1 + ?", "answer": answer, "score": score} for answer in "23"]
        (folder / "samples.jsonl").write_text("".join(json.dumps(one) + "\n" for one in samples))
    shares = read_item_shares(run_dir)
    assert shares["before"] == {("1 + ?", "2"): 0.0, ("1 + ?", "3"): 0.0}
    assert set(shares["after"].values()) == {1.0}
