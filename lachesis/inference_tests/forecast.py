"""Forecast the tokens, time and money of a whole run from the measurements of an inference test.

    tokens  = tokens per rollout x planned rollouts (training steps x rollouts per step)
    trained = prompt and completion of every rollout in a group with a signal; at most, of all
    money   = tokens x price per token of the base model
    time    = measured seconds per training step of an earlier run of the same kind, if there is
              one; else the measured seconds of sampling, group after group

A range is the mean plus and minus two standard errors over the groups, at least 20 % to each side,
because a test has few groups and lengths change while a model learns. Held-out evaluations are
sampled and not trained on: their tokens are answers per evaluation x evaluations x tokens per
answer. They are included if the environment says how many answers an evaluation has, and take no
time of a step. With a KL penalty every rollout is trained on, and the base model reads it once
more. Kept checkpoints are paid for by the month, beside the run.
"""

import math
import statistics
from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict

from lachesis.base.formatting import format_dollars, format_duration, format_range, shorten_count
from lachesis.config.prices import Prices, TokenCounts

MIN_RELATIVE_WIDTH = 0.2
MIN_COMPARED_STEPS = 5
# The lower end of an estimated time assumes this speed-up, because a run samples many groups at
# once.
MAX_SAMPLING_SPEEDUP = 8.0
# The upper end of an estimated time assumes that training takes as long as sampling in the test.
TRAINING_TIME_FACTOR = 2.0


class Range(BaseModel):
    """Hold the low, expected and high value of a quantity."""

    low: float
    expected: float
    high: float


class GroupUsage(BaseModel):
    """Hold the usage of one group: rollouts, prompt and sampled tokens, and seconds of sampling.

    `completions_per_prompt` is how many completions were sampled from each prompt that was sent.
    """

    rollouts: int
    completions_per_prompt: float = 1.0
    prefill: float
    sampled: float
    seconds: float
    has_signal: bool = True


class GroupSums(BaseModel):
    """Hold the usage of all groups of a test together, of which a forecast of any run is made."""

    groups: int
    rollouts: int
    signal_rollouts: int
    """Rollouts in groups with a signal."""
    prefill: float
    """Prompt tokens of the groups that send a prompt for each answer."""
    shared_prefill: float
    """Prompt tokens of the groups that send a prompt once, each times the group's rollouts."""
    sampled: float
    sequences: float
    """Tokens of all rollouts, each with its whole prompt and answer."""
    seconds: float
    relative_width: float
    """Two standard errors of the tokens per rollout, divided by their mean."""


def sum_groups(groups: Sequence[GroupUsage]) -> GroupSums | None:
    """Return the usage of all groups of a test together; None if they have no rollout."""
    measured = [group for group in groups if group.rollouts]
    if not measured:
        return None
    shared = [group for group in measured if group.completions_per_prompt > 1]
    return GroupSums(
        groups=len(measured),
        rollouts=sum(group.rollouts for group in measured),
        signal_rollouts=sum(group.rollouts for group in measured if group.has_signal),
        prefill=sum(group.prefill for group in measured if group not in shared),
        shared_prefill=sum(group.prefill * group.rollouts for group in shared),
        sampled=sum(group.sampled for group in measured),
        sequences=sum(
            group.prefill * group.completions_per_prompt + group.sampled for group in measured
        ),
        seconds=sum(group.seconds for group in measured),
        relative_width=_compute_relative_width(
            [(group.prefill + group.sampled) / group.rollouts for group in measured]
        ),
    )


class PlannedRun(BaseModel):
    """Describe a planned run: its training steps, and the rollouts of each."""

    total_steps: int
    batch_size: int
    group_size: int
    base_model: str
    profile: str
    evaluations: int = 0
    """Number of held-out evaluations, by all weights."""
    evaluation_answers: int | None = None
    """Number of answers of one evaluation; null if it is not known."""
    has_kl_penalty: bool = False
    kept_checkpoints: int = 0
    """Number of checkpoints that are left when the run has ended."""
    checkpoint_gb: float | None = None
    """Gigabytes of one checkpoint; null if the sizes of the model's layers are not known."""

    @property
    def num_evaluation_answers(self) -> int:
        """Return the number of answers of all evaluations, as far as it is known."""
        return self.evaluations * (self.evaluation_answers or 0)

    @property
    def num_rollouts(self) -> int:
        """Return the number of rollouts of all steps."""
        return self.total_steps * self.batch_size


class Forecast(BaseModel):
    """Forecast a whole run; money is in US dollars, and null if the base model has no price."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    planned: PlannedRun
    tokens_per_rollout: TokenCounts
    tokens: Range
    """All tokens together: prefill, sampled and trained."""
    hours: Range
    cost_usd: Range | None
    """Everything but the storage of checkpoints."""
    evaluation_cost_usd: Range | None = None
    """The part of `cost_usd` for held-out evaluations."""
    storage_gb: float | None = None
    """Gigabytes of the checkpoints that are left; null if that is not known."""
    storage_usd_per_month: float | None = None
    basis: str
    """What the forecast is based on."""


class ActualUsage(BaseModel):
    """Hold the usage until now; `ratio` is actual ÷ expected over the finished steps."""

    tokens: TokenCounts
    hours: float
    """Hours from the start of the first process to the end of the last one."""
    training_hours: float
    """Hours of the training steps, which the forecast is about."""
    cost_usd: float | None
    ratio: dict[str, float] = {}


def _estimate_tokens_per_rollout(
    sums: GroupSums, planned: PlannedRun
) -> tuple[TokenCounts, TokenCounts, TokenCounts]:
    """Return the low, the expected and the high number of tokens per rollout."""
    # A prompt that several completions share is paid once for all of them, and the run may have
    # other groups than the test.
    prefill = (sums.prefill + sums.shared_prefill / planned.group_size) / sums.rollouts
    sampled, sequence = sums.sampled / sums.rollouts, sums.sequences / sums.rollouts
    signal_share = sums.signal_rollouts / sums.rollouts
    if planned.has_kl_penalty:
        signal_share, prefill = 1.0, prefill + sequence
    width = sums.relative_width
    low = TokenCounts(
        prefill=prefill * (1 - width),
        sampled=sampled * (1 - width),
        trained=sequence * (1 - width) * signal_share,
    )
    expected = TokenCounts(
        prefill=prefill, sampled=sampled, trained=sequence * max(signal_share, MIN_RELATIVE_WIDTH)
    )
    high = TokenCounts(
        prefill=prefill * (1 + width), sampled=sampled * (1 + width), trained=sequence * (1 + width)
    )
    return low, expected, high


def make_forecast(
    sums: GroupSums,
    planned: PlannedRun,
    prices: Prices | None,
    *,
    step_seconds: float | None = None,
    storage_price: float | None = None,
) -> Forecast:
    """Return the forecast of a planned run.

    Args:
        sums: What the groups of a test have used.
        planned: The planned run.
        prices: The prices of the base model, if they are known.
        step_seconds: The seconds per step of an earlier run of the same kind, if there is one.
        storage_price: US dollars per gigabyte and month of checkpoints, if that is known.
    """
    per_rollout = _estimate_tokens_per_rollout(sums, planned)
    evaluations = [
        _count_evaluation_tokens(tokens, planned.num_evaluation_answers) for tokens in per_rollout
    ]
    totals = [
        _add_tokens(_scale_tokens(tokens, planned.num_rollouts), evaluation)
        for tokens, evaluation in zip(per_rollout, evaluations, strict=True)
    ]
    cost_usd = evaluation_cost_usd = None
    if prices:
        cost_usd = make_range([prices.compute_cost(tokens) for tokens in totals], digits=4)
        evaluation_cost_usd = make_range(
            [prices.compute_cost(tokens) for tokens in evaluations], digits=4
        )
    return Forecast(
        planned=planned,
        tokens_per_rollout=_scale_tokens(per_rollout[1], 1, digits=2),
        tokens=make_range([tokens.total for tokens in totals], digits=0),
        hours=_estimate_hours(sums, planned, step_seconds),
        cost_usd=cost_usd,
        evaluation_cost_usd=evaluation_cost_usd,
        **_forecast_storage(planned, storage_price),
        basis=_describe_basis(sums, planned, prices, step_seconds),
    )


def _forecast_storage(planned: PlannedRun, price: float | None) -> dict[str, float | None]:
    """Return the size of the kept checkpoints, and their monthly cost."""
    if planned.checkpoint_gb is None:
        return {"storage_gb": None, "storage_usd_per_month": None}
    storage_gb = planned.checkpoint_gb * planned.kept_checkpoints
    return {
        "storage_gb": round(storage_gb, 3),
        "storage_usd_per_month": None if price is None else round(storage_gb * price, 4),
    }


def _describe_basis(
    sums: GroupSums, planned: PlannedRun, prices: Prices | None, step_seconds: float | None
) -> str:
    """Return in words what the forecast was computed from."""
    measured_text = f"{sums.rollouts} rollouts in {sums.groups} groups"
    if step_seconds:
        pace_text = f"the pace of an earlier run ({step_seconds:.2f} s a step)"
    else:
        pace_text = "the speed of that sampling"
    price_text = f"prices of {prices.dated}" if prices else "no known price of the base model"
    evaluation_text = _describe_missing_evaluations(planned)
    return f"{measured_text}, {pace_text}{evaluation_text}, {price_text}"


def compare_with_forecast(
    forecast: Forecast,
    *,
    steps: int,
    tokens: TokenCounts,
    training_hours: float,
    cost_usd: float | None,
) -> dict[str, float]:
    """Return the usage of `steps` training steps divided by the same share of the forecast.

    Empty for few steps, because the first one waits for the environment.
    """
    if steps < MIN_COMPARED_STEPS:
        return {}
    share = steps / forecast.planned.total_steps
    expected = {
        "tokens": forecast.tokens.expected * share,
        "hours": forecast.hours.expected * share,
    }
    actual = {"tokens": tokens.total, "hours": training_hours}
    if forecast.cost_usd is not None and cost_usd is not None:
        expected["cost_usd"], actual["cost_usd"] = forecast.cost_usd.expected * share, cost_usd
    return {key: round(actual[key] / value, 3) for key, value in expected.items() if value > 0}


def _describe_missing_evaluations(planned: PlannedRun) -> str:
    """Describe the evaluations that a forecast leaves out."""
    unknown = planned.evaluations and planned.evaluation_answers is None
    if unknown:
        return f", without {planned.evaluations} evaluations, whose size is not known"
    return ""


def _estimate_hours(sums: GroupSums, planned: PlannedRun, step_seconds: float | None) -> Range:
    """Return the hours of a run by the pace of an earlier run, or by the test's own sampling."""
    if step_seconds:
        hours = planned.total_steps * step_seconds / 3600
        return make_range(
            [hours * (1 - MIN_RELATIVE_WIDTH), hours, hours * (1 + MIN_RELATIVE_WIDTH)], digits=4
        )
    sequential_hours = planned.num_rollouts * sums.seconds / sums.rollouts / 3600
    low, high = sequential_hours / MAX_SAMPLING_SPEEDUP, sequential_hours * TRAINING_TIME_FACTOR
    return make_range([low, math.sqrt(low * high), high], digits=4)


def _compute_relative_width(values: Sequence[float]) -> float:
    """Return two standard errors of the mean divided by the mean, at least MIN_RELATIVE_WIDTH."""
    mean = statistics.fmean(values)
    if len(values) < 2 or mean <= 0:
        return 2 * MIN_RELATIVE_WIDTH
    return min(
        0.9, max(MIN_RELATIVE_WIDTH, 2 * statistics.stdev(values) / math.sqrt(len(values)) / mean)
    )


def _count_evaluation_tokens(per_answer: TokenCounts, num_answers: int) -> TokenCounts:
    """Return the tokens of evaluations, which train on nothing."""
    return TokenCounts(
        prefill=per_answer.prefill * num_answers, sampled=per_answer.sampled * num_answers
    )


def _add_tokens(first: TokenCounts, second: TokenCounts) -> TokenCounts:
    """Return the sum of two counts, in whole tokens."""
    return TokenCounts(
        prefill=round(first.prefill + second.prefill),
        sampled=round(first.sampled + second.sampled),
        trained=round(first.trained + second.trained),
    )


def _scale_tokens(tokens: TokenCounts, factor: float, digits: int = 0) -> TokenCounts:
    return TokenCounts(
        **{key: round(value * factor, digits) for key, value in tokens.model_dump().items()}
    )


def make_range(values: Sequence[float], digits: int) -> Range:
    """Return the range of a low, an expected and a high value."""
    low, expected, high = (round(value, digits) for value in values)
    return Range(low=low, expected=expected, high=high)


def list_forecast_ranges(forecast: Forecast) -> list[tuple[str, str]]:
    """Return each quantity of a forecast with its range as people write it."""
    tokens, hours, cost = forecast.tokens, forecast.hours, forecast.cost_usd
    ranges = [
        ("tokens", format_range(tokens.low, tokens.high, shorten_count)),
        ("training", format_range(hours.low * 3600, hours.high * 3600, format_duration)),
    ]
    if cost is not None:
        ranges.append(("cost", format_range(cost.low, cost.high, format_dollars)))
    return ranges


def describe_forecast(forecast: Forecast) -> str:
    """Return a forecast as one sentence: the tokens, the time and the price of its steps."""
    planned, ranges = forecast.planned, dict(list_forecast_ranges(forecast))
    return (
        f"{planned.total_steps:,} steps of {planned.batch_size:,} rollouts take "
        f"{ranges['tokens']} tokens, {ranges['training']} of training, "
        f"{ranges.get('cost', 'no price known for the base model')}"
    )
