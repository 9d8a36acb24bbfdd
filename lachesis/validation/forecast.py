"""What a whole run will take: tokens, time and money as ranges, from what an inference test measured; and what it took.

    tokens  = tokens per rollout x planned rollouts (training steps x rollouts per step)
    trained = prompt and completion of every rollout in a group with a signal; at most, of all rollouts
    money   = tokens x price per token of the base model
    time    = measured seconds per training step of an earlier run of the same kind, when there is one; else the measured
              seconds of sampling, group after group

A range is the mean plus and minus two standard errors over the groups, at least 20 % to each side: a test has few groups, and
lengths drift while a model learns.

Held-out evaluations are sampled and not trained on: their tokens are answers per evaluation x evaluations x tokens per answer.
They are part of it where the environment says how many answers an evaluation has. They take no time of a step.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict

from lachesis.config.prices import Prices, TokenCounts

LEAST_WIDTH = 0.2
LEAST_STEPS = 5
PARALLEL = 8.0
"""A run samples many groups at once; a test one after the other. The lower end of a guessed time assumes this speed-up."""
TRAINING_SHARE = 2.0
"""The upper end of a guessed time assumes that training takes as long as the sampling of the test."""


class Range(BaseModel):
    low: float
    expected: float
    high: float


class Rollouts(BaseModel):
    """Of one group: rollouts, prompt and sampled tokens, and seconds of sampling. `copies` is how many completions were drawn
    from each prompt that was sent."""

    rollouts: int
    copies: float = 1.0
    prefill: float
    sampled: float
    seconds: float
    signal: bool = True


class Planned(BaseModel):
    """What a run would make: its training steps, and the rollouts of each."""

    total_steps: int
    batch_size: int
    group_size: int
    base_model: str
    profile: str
    evaluations: int = 0
    """Held-out evaluations, those before and after training included."""
    evaluation_answers: int | None = None
    """Answers of one evaluation; null when it is not known."""

    @property
    def evaluated(self) -> int:
        """The answers of all evaluations, as far as they are known."""
        return self.evaluations * (self.evaluation_answers or 0)

    @property
    def rollouts(self) -> int:
        return self.total_steps * self.batch_size


class Forecast(BaseModel):
    """Of a whole run. Money is in US dollars; null when the base model has no price."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    planned: Planned
    tokens_per_rollout: TokenCounts
    prompt_is_shared: bool = False
    """Whether a prompt is sent once for the whole group."""
    tokens: Range
    """All tokens together: prefill, sampled and trained."""
    hours: Range
    cost_usd: Range | None
    basis: str
    """What it was made from."""


class Actual(BaseModel):
    """What a run took until now. `ratio` is actual ÷ expected, scaled to the steps that were made."""

    tokens: TokenCounts
    hours: float
    """From the start of the first process to the end of the last one."""
    training_hours: float
    """Of these, the training steps; the forecast is about them."""
    cost_usd: float | None
    ratio: dict[str, float] = {}


def forecast(
    groups: Sequence[Rollouts], planned: Planned, prices: Prices | None, *, step_seconds: float | None = None
) -> Forecast | None:
    """None without a measured group. `step_seconds` is the pace of an earlier run of the same kind."""
    measured = [one for one in groups if one.rollouts]
    if not measured:
        return None
    rollouts = sum(one.rollouts for one in measured)
    # A prompt that several completions share is paid once for all of them, and the run may have other groups than the test.
    prefill = sum(one.prefill * _sharing(one, planned) for one in measured) / rollouts
    sampled = sum(one.sampled for one in measured) / rollouts
    signal = sum(one.rollouts for one in measured if one.signal) / rollouts
    width = _width([(one.prefill + one.sampled) / one.rollouts for one in measured])
    length = sum(one.prefill * one.copies + one.sampled for one in measured) / rollouts
    low = TokenCounts(prefill=prefill * (1 - width), sampled=sampled * (1 - width), trained=length * (1 - width) * signal)
    expected = TokenCounts(prefill=prefill, sampled=sampled, trained=length * max(signal, LEAST_WIDTH))
    high = TokenCounts(prefill=prefill * (1 + width), sampled=sampled * (1 + width), trained=length * (1 + width))
    ranges = [_plus_evaluations(_scaled(one, planned.rollouts), one, planned.evaluated) for one in (low, expected, high)]
    own = f"{rollouts} rollouts in {len(measured)} groups"
    pace = f"the pace of an earlier run ({step_seconds:.2f} s a step)" if step_seconds else "the speed of that sampling"
    return Forecast(
        planned=planned,
        tokens_per_rollout=_scaled(expected, 1, digits=2),
        prompt_is_shared=any(one.copies > 1 for one in measured),
        tokens=_range([one.total for one in ranges], digits=0),
        hours=_hours(measured, rollouts, planned, step_seconds),
        cost_usd=_range([prices.compute_cost(one) for one in ranges], digits=4) if prices else None,
        basis=f"{own}, {pace}{_without(planned)}"
        + (f", prices of {prices.dated}" if prices else ", no price known for the base model"),
    )


def compare(made: Forecast, *, steps: int, tokens: TokenCounts, training_hours: float, cost_usd: float | None) -> dict[str, float]:
    """What `steps` training steps took, divided by the same share of the forecast. Nothing for a few steps, of which the first
    one waits for the environment."""
    if steps < LEAST_STEPS:
        return {}
    share = steps / made.planned.total_steps
    expected = {"tokens": made.tokens.expected * share, "hours": made.hours.expected * share}
    found = {"tokens": tokens.total, "hours": training_hours}
    if made.cost_usd is not None and cost_usd is not None:
        expected["cost_usd"], found["cost_usd"] = made.cost_usd.expected * share, cost_usd
    return {key: round(found[key] / value, 3) for key, value in expected.items() if value > 0}


def rescaled(made: Forecast, planned: Planned) -> Forecast:
    """The same forecast for a run with other numbers of steps and rollouts, and other groups, whose rollouts share a prompt."""
    before = made.tokens_per_rollout
    prefill = before.prefill * (made.planned.group_size / planned.group_size if made.prompt_is_shared else 1.0)
    tokens = before.model_copy(update={"prefill": round(prefill, 2)})
    more = planned.rollouts / made.planned.rollouts
    longer = _total(tokens, planned) / max(_total(before, made.planned), 1e-9)
    ranges = {
        name: Range(**{key: round(getattr(one, key) * factor, 4) for key in ("low", "expected", "high")})
        for name, factor in (("tokens", longer), ("hours", more), ("cost_usd", longer))
        if (one := getattr(made, name)) is not None
    }
    return made.model_copy(update={"planned": planned, "tokens_per_rollout": tokens, **ranges})


def _without(planned: Planned) -> str:
    """Return what a forecast leaves out, in words."""
    unknown = planned.evaluations and planned.evaluation_answers is None
    return f", without {planned.evaluations} evaluations, whose size is not known" if unknown else ""


def _total(per_rollout: TokenCounts, planned: Planned) -> float:
    """Return the tokens of all rollouts and of all evaluations, which train on nothing."""
    return planned.rollouts * per_rollout.total + planned.evaluated * (per_rollout.prefill + per_rollout.sampled)


def _hours(measured: Sequence[Rollouts], rollouts: int, planned: Planned, step_seconds: float | None) -> Range:
    if step_seconds:
        hours = planned.total_steps * step_seconds / 3600
        return _range([hours * (1 - LEAST_WIDTH), hours, hours * (1 + LEAST_WIDTH)], digits=4)
    alone = planned.rollouts * sum(one.seconds for one in measured) / rollouts / 3600
    low, high = alone / PARALLEL, alone * TRAINING_SHARE
    return _range([low, math.sqrt(low * high), high], digits=4)


def _sharing(group: Rollouts, planned: Planned) -> float:
    return group.rollouts / planned.group_size if group.copies > 1 else 1.0


def _width(values: Sequence[float]) -> float:
    """Two standard errors of the mean over the mean, at least LEAST_WIDTH."""
    mean = statistics.fmean(values)
    if len(values) < 2 or mean <= 0:
        return 2 * LEAST_WIDTH
    return min(0.9, max(LEAST_WIDTH, 2 * statistics.stdev(values) / math.sqrt(len(values)) / mean))


def _plus_evaluations(tokens: TokenCounts, per_answer: TokenCounts, answers: int) -> TokenCounts:
    """Add what evaluations take, which train on nothing."""
    prefill, sampled = per_answer.prefill * answers, per_answer.sampled * answers
    return tokens.model_copy(update={"prefill": round(tokens.prefill + prefill), "sampled": round(tokens.sampled + sampled)})


def _scaled(tokens: TokenCounts, factor: float, digits: int = 0) -> TokenCounts:
    return TokenCounts(**{key: round(value * factor, digits) for key, value in tokens.model_dump().items()})


def _range(values: Sequence[float], digits: int) -> Range:
    low, expected, high = (round(value, digits) for value in values)
    return Range(low=low, expected=expected, high=high)
