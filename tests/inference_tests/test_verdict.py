"""The verdict on an environment: its faults, its remarks, and how sure its shares are."""

from hypothesis import given
from hypothesis import strategies as st

from lachesis.base.confidence_intervals import wilson_interval
from lachesis.inference_tests.verdict import MIN_GROUPS, InferenceCounts, judge_learnability

MIXED = [[0.0, 1.0]] * MIN_GROUPS


def test_every_share_has_its_interval():
    verdict = judge_learnability(
        InferenceCounts(scores_P=[*MIXED, [1.0, 1.0]], completions=20, truncated=5, invalid=2)
    )
    assert verdict.zero_signal_share == round(1 / 9, 4)
    assert verdict.intervals == {
        "zero_signal_share": tuple(round(bound, 4) for bound in wilson_interval(1, 9)),
        "truncation_rate": tuple(round(bound, 4) for bound in wilson_interval(5, 20)),
        "invalid_rate": tuple(round(bound, 4) for bound in wilson_interval(2, 20)),
    }


def test_a_share_of_nothing_has_none():
    verdict = judge_learnability(InferenceCounts())
    assert (verdict.word, verdict.evidence, verdict.intervals) == ("broken", ["no group came"], {})


def test_an_error_and_the_faults_of_a_check_are_evidence():
    verdict = judge_learnability(
        InferenceCounts(scores_P=MIXED),
        error="the model is away",
        model_free={"faults": ["the gold answer scores 0"]},
    )
    assert (verdict.word, verdict.evidence) == (
        "broken",
        ["the gold answer scores 0", "the model is away"],
    )


def test_groups_without_scores_are_named_with_what_was_raised():
    verdict = judge_learnability(
        InferenceCounts(
            scores_P=[[0.0, 1.0]], invalid=6, errors={"ValueError: x": 5, "KeyError: y": 1}
        )
    )
    assert verdict.evidence == [
        "6 of 8 rollouts have no usable score: ValueError: x (5 times); KeyError: y (1 times)"
    ]
    assert judge_learnability(InferenceCounts(invalid=4)).evidence == [
        "4 of 4 rollouts have no usable score"
    ]


def test_an_environment_that_leaves_out_all_its_groups_is_broken():
    assert (
        judge_learnability(InferenceCounts(empty=3))
        .evidence[0]
        .startswith("no group was made in 3 tries")
    )


def test_one_score_for_every_answer_is_a_fault_of_the_verifier():
    verdict = judge_learnability(InferenceCounts(scores_P=[[0.5, 0.5], [0.5, 0.5]]))
    assert verdict.word == "broken"
    assert verdict.evidence[0].startswith("all 4 rollouts got the score 0.5")


def test_the_remarks():
    verdict = judge_learnability(
        InferenceCounts(scores_P=[[0.0, 0.0], []], empty=1, completions=4, truncated=2)
    )
    assert verdict.word == "too hard"
    assert [text.split(";")[0] for text in verdict.evidence[1:]] == [
        "2 of 4 completions were truncated at the token limit",
        "1 groups were dropped by the environment itself",
        "all 2 scores are 0",
        "based on 1 groups only",
    ]
    invalid = judge_learnability(
        InferenceCounts(scores_P=MIXED, invalid=1, errors={"ValueError: x": 1})
    )
    assert "1 of 17 rollouts have no usable score: ValueError: x" in invalid.evidence


scores = st.lists(st.lists(st.sampled_from([0.0, 0.25, 1.0]), max_size=4), max_size=12)


@given(scores, st.integers(0, 5), st.integers(0, 5))
def test_a_verdict_is_sound_whatever_was_seen(scores_P, empty, invalid):
    """A run whose groups all differ is never called too easy or too hard; shares lie in their
    intervals.
    """
    verdict = judge_learnability(InferenceCounts(scores_P=scores_P, empty=empty, invalid=invalid))
    for name, (low, high) in verdict.intervals.items():
        assert low - 1e-4 <= getattr(verdict, name) <= high + 1e-4
    groups = [group for group in scores_P if group]
    if verdict.word == "learnable":
        assert any(len(set(group)) > 1 for group in groups)
    if verdict.word in ("too easy", "too hard"):
        assert any(len(set(group)) == 1 for group in groups) or empty
    assert (verdict.word == "broken") or groups
