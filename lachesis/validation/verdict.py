"""Whether an environment can be learned from with a model: one word, with its evidence. Pure functions on what a test has seen.

    learnable   rewards differ inside enough groups, so there is a gradient
    too easy    nearly every group is solved as a whole
    too hard    nearly every group fails as a whole
    broken      scores say nothing about answers, or many rollouts have none

A group whose rewards are all equal has no advantage, and so no gradient (Shao et al. 2024, arXiv:2402.03300, eq. 3).
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from lachesis.base.intervals import wilson_interval
from lachesis.env_process.counters import EMPTY_GROUP_MESSAGE

Word = Literal["learnable", "too easy", "too hard", "broken"]
MOST_INVALID = 0.2
"""Above this share of rollouts without a usable score the rest says little."""
LEAST_SIGNAL = 0.2
"""Below this share of groups with a signal, training mostly waits."""
MANY_TRUNCATED = 0.5
FEW_GROUPS = 8
EQUAL = 1e-6
"""Scores that differ by less, relative to themselves, are the same number rounded differently."""
ORDER: tuple[Word, ...] = ("learnable", "too easy", "too hard", "broken")


class Seen(BaseModel):
    """What a test has counted. `scores_P` holds one list of scores per group."""

    scores_P: list[list[float]] = []
    empty: int = 0
    """Groups that the environment left out itself, without an error, as many do with equal rewards."""
    invalid: int = 0
    """Rollouts without a usable score: the environment raised, or gave a score that is no finite number."""
    completions: int = 0
    truncated: int = 0
    """Completions that were cut off at their limit of tokens."""
    errors: dict[str, int] = {}
    """What the environment raised or gave instead of scores, and how often."""


class Verdict(BaseModel):
    """`evidence` holds the sentences that led to the word, the strongest first. Shares are from 0 to 1."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    word: Word
    """learnable, too easy, too hard or broken."""
    evidence: list[str]
    groups: int
    reward_mean: float | None
    reward_std: float | None
    """Over all rollouts."""
    reward_spread: float | None
    """Mean of the groups' own standard deviations: what is left after the difficulty of items is taken out."""
    zero_signal_share: float | None
    """Share of groups whose rewards are all equal, or that the environment left out."""
    truncation_rate: float | None
    invalid_rate: float
    intervals: dict[str, tuple[float, float]] = {}
    """The 95 % interval of each share, by its name; none for a share of nothing."""


def judge(seen: Seen, *, error: str | None = None, model_free: Mapping[str, Any] | None = None) -> Verdict:
    """The verdict on one model. `error` is why the test could not be made; `model_free` the result of the check without a
    model, if the environment offers one."""
    scores = [score for group in seen.scores_P for score in group]
    groups = [group for group in seen.scores_P if group]
    rollouts = len(scores) + seen.invalid
    silent = sum(max(group) - min(group) <= EQUAL * max(map(abs, group)) for group in groups) + seen.empty
    tried = len(groups) + seen.empty
    numbers = {
        "groups": len(groups),
        "reward_mean": _rounded(statistics.fmean(scores)) if scores else None,
        "reward_std": _rounded(statistics.pstdev(scores)) if scores else None,
        "reward_spread": _rounded(statistics.fmean(map(statistics.pstdev, groups))) if groups else None,
        "zero_signal_share": _rounded(silent / tried) if tried else None,
        "truncation_rate": _rounded(seen.truncated / seen.completions) if seen.completions else None,
        "invalid_rate": _rounded(seen.invalid / rollouts) if rollouts else 0.0,
    }
    counts = {
        "zero_signal_share": (silent, tried),
        "truncation_rate": (seen.truncated, seen.completions),
        "invalid_rate": (seen.invalid, rollouts),
    }
    intervals = _intervals(counts)
    broken = _faults(seen, groups, rollouts, error, model_free or {})
    if broken:
        return Verdict(word="broken", evidence=broken, intervals=intervals, **numbers)
    word, evidence = _learnability(tried, scores, 1 - silent / tried)
    evidence += _remarks(seen, groups, rollouts)
    return Verdict(word=word, evidence=evidence, intervals=intervals, **numbers)


def _faults(
    seen: Seen, groups: Sequence[list[float]], rollouts: int, error: str | None, model_free: Mapping[str, Any]
) -> list[str]:
    """Why nothing could be learned whatever the model does."""
    faults = list(model_free.get("faults", []))
    if error:
        faults.append(error)
    if rollouts and seen.invalid / rollouts > MOST_INVALID:
        said = "; ".join(f"{text} ({count} times)" for text, count in sorted(seen.errors.items(), key=lambda one: -one[1])[:3])
        faults.append(f"{seen.invalid} of {rollouts} rollouts have no usable score{f': {said}' if said else ''}")
    if not groups and not faults:
        faults.append(f"no group came in {seen.empty} tries: {EMPTY_GROUP_MESSAGE}" if seen.empty else "no group came")
    values = {score for group in groups for score in group}
    if len(values) == 1 and 0 < (only := values.pop()) < 1 and rollouts > 1:
        faults.append(f"every one of {rollouts} rollouts got the score {only:g}, whatever it said: the verifier does not tell")
    return faults


def _learnability(groups: int, scores: list[float], signal: float) -> tuple[Word, list[str]]:
    right = sum(score > 0 for score in scores)
    share = f"{round(signal * groups)} of {groups} groups have rewards that differ"
    above = f"{right} of {len(scores)} rollouts score above 0"
    if signal >= LEAST_SIGNAL:
        return "learnable", [f"{share}; {above}"]
    if right / len(scores) >= 0.5:
        return "too easy", [f"{above}; {share}: nothing is left to learn"]
    return "too hard", [f"{above}; {share}: there is almost no reward to learn from"]


def _remarks(seen: Seen, groups: Sequence[list[float]], rollouts: int) -> list[str]:
    """What is worth knowing beside the word."""
    remarks = []
    if seen.completions and seen.truncated / seen.completions >= MANY_TRUNCATED:
        remarks.append(f"{seen.truncated} of {seen.completions} completions were cut off at their limit of tokens; raise it")
    if seen.invalid:
        remarks.append(f"{seen.invalid} of {rollouts} rollouts have no usable score: {'; '.join(list(seen.errors)[:3])}")
    if seen.empty:
        remarks.append(f"{seen.empty} groups were left out by the environment itself; they count as groups without a signal")
    if rollouts > 1 and len({score for group in groups for score in group}) == 1:
        remarks.append(f"every one of the {rollouts} scores is {groups[0][0]:g}; look whether the verifier tells answers apart")
    if len(groups) < FEW_GROUPS:
        remarks.append(f"from {len(groups)} groups only; more of them make it surer")
    return remarks


def best(words: Sequence[str]) -> Word:
    """Of several models the most hopeful one: an environment that one model can learn is sound."""
    return next((word for word in ORDER if word in words), "broken")


def _intervals(counts: Mapping[str, tuple[int, int]]) -> dict[str, tuple[float, float]]:
    """Return the 95 % interval of each share that has items, by its name."""
    known = {name: wilson_interval(*pair) for name, pair in counts.items() if pair[1]}
    return {name: (_rounded(low), _rounded(high)) for name, (low, high) in known.items()}


def _rounded(value: float) -> float:
    return round(value, 4)
