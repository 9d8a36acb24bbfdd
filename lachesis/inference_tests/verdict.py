"""Judge whether a model can learn from an environment; pure functions on what a test has counted.

    learnable   rewards differ inside enough groups, so there is a gradient
    too easy    nearly every group is solved completely
    too hard    nearly every group fails completely
    broken      scores do not depend on answers, or many rollouts have none

A group whose rewards are all equal has no advantage, and so no gradient (Shao et al. 2024,
arXiv:2402.03300, eq. 3).
"""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from lachesis.base.confidence_intervals import wilson_interval
from lachesis.environment_process.rollout_counters import EMPTY_GROUP_MESSAGE

VerdictWord = Literal["learnable", "too easy", "too hard", "broken"]
# Above this share of rollouts without a usable score the environment is broken.
MAX_INVALID_SHARE = 0.2
# Below this share of groups with a signal, training mostly waits.
MIN_SIGNAL_SHARE = 0.2
MAX_TRUNCATED_SHARE = 0.5
MIN_GROUPS = 8
# Scores with a smaller relative difference are the same number rounded differently.
SCORE_TOLERANCE = 1e-6
WORDS_BEST_FIRST: tuple[VerdictWord, ...] = ("learnable", "too easy", "too hard", "broken")


class InferenceCounts(BaseModel):
    """Hold the counts of a test; `scores_P` has one list of scores per group."""

    scores_P: list[list[float]] = []
    empty: int = 0
    """Number of groups that the environment dropped without an error, as many do with equal
    rewards.
    """
    invalid: int = 0
    """Number of rollouts without a usable score: the environment raised, or its score is not a
    finite number.
    """
    completions: int = 0
    truncated: int = 0
    """Number of completions that the token limit has truncated."""
    errors: dict[str, int] = {}
    """What the environment raised or returned instead of scores, and how often."""


class Verdict(BaseModel):
    """Hold a verdict with its evidence, the strongest sentence first; shares are from 0 to 1."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    word: VerdictWord
    """The verdict: learnable, too easy, too hard or broken."""
    evidence: list[str]
    groups: int
    reward_mean: float | None
    reward_std: float | None
    """Standard deviation of the rewards of all rollouts."""
    reward_spread: float | None
    """Mean standard deviation inside groups, which does not contain the difficulty of the items."""
    zero_signal_share: float | None
    """Share of groups whose rewards are all equal, or that the environment dropped."""
    truncation_rate: float | None
    invalid_rate: float
    intervals: dict[str, tuple[float, float]] = {}
    """The 95 % interval of each share by its name; a share of no items has none."""


def judge_learnability(
    inference_counts: InferenceCounts,
    *,
    error: str | None = None,
    model_free: Mapping[str, Any] | None = None,
) -> Verdict:
    """Return the verdict on one model.

    Args:
        inference_counts: What the test has counted.
        error: Why the test could not be made, if so.
        model_free: The result of the check without a model, if the environment supports it.
    """
    scores = [score for group in inference_counts.scores_P for score in group]
    groups = [group for group in inference_counts.scores_P if group]
    rollouts = len(scores) + inference_counts.invalid
    num_without_signal = (
        sum(max(group) - min(group) <= SCORE_TOLERANCE * max(map(abs, group)) for group in groups)
        + inference_counts.empty
    )
    num_tried = len(groups) + inference_counts.empty
    counts = {
        "zero_signal_share": (num_without_signal, num_tried),
        "truncation_rate": (inference_counts.truncated, inference_counts.completions),
        "invalid_rate": (inference_counts.invalid, rollouts),
    }
    numbers = {**_summarize_scores(scores, groups), **_compute_shares(counts)}
    intervals = _compute_intervals(counts)
    faults = _find_faults(inference_counts, groups, rollouts, error, model_free or {})
    if faults:
        return Verdict(word="broken", evidence=faults, intervals=intervals, **numbers)
    # Without faults something was tried, so the share has a denominator.
    word, evidence = _choose_word(num_tried, scores, 1 - num_without_signal / num_tried)
    evidence += _collect_remarks(inference_counts, groups, rollouts)
    return Verdict(word=word, evidence=evidence, intervals=intervals, **numbers)


def _summarize_scores(scores: list[float], groups: list[list[float]]) -> dict[str, Any]:
    """Return number of groups, and mean, deviation and spread of their rewards."""
    if not scores:
        return {"groups": 0, "reward_mean": None, "reward_std": None, "reward_spread": None}
    return {
        "groups": len(groups),
        "reward_mean": _round(statistics.fmean(scores)),
        "reward_std": _round(statistics.pstdev(scores)),
        "reward_spread": _round(statistics.fmean(map(statistics.pstdev, groups))),
    }


def _compute_shares(counts: Mapping[str, tuple[int, int]]) -> dict[str, float | None]:
    """Return each count's share of its total; None without a total."""
    shares: dict[str, float | None] = {
        name: _round(count / total) if total else None for name, (count, total) in counts.items()
    }
    # A model whose every answer was dropped has no invalid ones either.
    shares["invalid_rate"] = shares["invalid_rate"] or 0.0
    return shares


def _find_faults(
    inference_counts: InferenceCounts,
    groups: Sequence[list[float]],
    rollouts: int,
    error: str | None,
    model_free: Mapping[str, Any],
) -> list[str]:
    """Return why nothing could be learned whatever the model does."""
    faults = list(model_free.get("faults", []))
    if error:
        faults.append(error)
    if rollouts and inference_counts.invalid / rollouts > MAX_INVALID_SHARE:
        frequent_errors = "; ".join(
            f"{text} ({count} times)"
            for text, count in sorted(inference_counts.errors.items(), key=lambda item: -item[1])[
                :3
            ]
        )
        faults.append(
            f"{inference_counts.invalid} of {rollouts} rollouts have no usable score"
            f"{f': {frequent_errors}' if frequent_errors else ''}"
        )
    if not groups and not faults:
        faults.append(
            f"no group was made in {inference_counts.empty} tries: {EMPTY_GROUP_MESSAGE}"
            if inference_counts.empty
            else "no group came"
        )
    values = {score for group in groups for score in group}
    if len(values) == 1 and 0 < (single_score := values.pop()) < 1 and rollouts > 1:
        faults.append(
            f"all {rollouts} rollouts got the score {single_score:g}: the verifier does not "
            "distinguish answers"
        )
    return faults


def _choose_word(
    num_groups: int, scores: list[float], signal_share: float
) -> tuple[VerdictWord, list[str]]:
    """Return the verdict by the share of groups with a signal, and its evidence."""
    num_correct = sum(score > 0 for score in scores)
    signal_text = (
        f"{round(signal_share * num_groups)} of {num_groups} groups have rewards that differ"
    )
    correct_text = f"{num_correct} of {len(scores)} rollouts score above 0"
    if signal_share >= MIN_SIGNAL_SHARE:
        return "learnable", [f"{signal_text}; {correct_text}"]
    if num_correct / len(scores) >= 0.5:
        return "too easy", [f"{correct_text}; {signal_text}: nothing is left to learn"]
    return "too hard", [f"{correct_text}; {signal_text}: there is almost no reward to learn from"]


def _collect_remarks(
    inference_counts: InferenceCounts, groups: Sequence[list[float]], rollouts: int
) -> list[str]:
    """Return further observations for the reader."""
    remarks = []
    truncated, completions = inference_counts.truncated, inference_counts.completions
    if completions and truncated / completions >= MAX_TRUNCATED_SHARE:
        remarks.append(
            f"{truncated} of {completions} completions were truncated at the token limit; raise it"
        )
    if inference_counts.invalid:
        remarks.append(
            f"{inference_counts.invalid} of {rollouts} rollouts have no usable score: "
            f"{'; '.join(list(inference_counts.errors)[:3])}"
        )
    if inference_counts.empty:
        remarks.append(
            f"{inference_counts.empty} groups were dropped by the environment itself; they count "
            f"as groups without a signal"
        )
    if rollouts > 1 and len({score for group in groups for score in group}) == 1:
        remarks.append(
            f"all {rollouts} scores are {groups[0][0]:g}; check whether the verifier distinguishes "
            "answers"
        )
    if len(groups) < MIN_GROUPS:
        remarks.append(f"based on {len(groups)} groups only; more groups make it more certain")
    return remarks


def choose_best_word(words: Sequence[str]) -> VerdictWord:
    """Return the best verdict: if one model can learn, the environment works."""
    return next((word for word in WORDS_BEST_FIRST if word in words), "broken")


def _compute_intervals(counts: Mapping[str, tuple[int, int]]) -> dict[str, tuple[float, float]]:
    """Return the 95 % interval of each share that has items, by its name."""
    intervals = {name: wilson_interval(*pair) for name, pair in counts.items() if pair[1]}
    return {name: (_round(low), _round(high)) for name, (low, high) in intervals.items()}


def _round(value: float) -> float:
    return round(value, 4)
