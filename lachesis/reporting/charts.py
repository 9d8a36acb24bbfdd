"""List the curves of a run's page, and leave out those that would show nothing.

A metric that is the same in every step is a word below the curves, and one that the run does not
have is not there at all.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from lachesis.base.formatting import format_decimal
from lachesis.runs.metrics import Step
from lachesis.weight_agreement.logprob_gap import SUSPECT_LOGPROB_GAP


@dataclass(frozen=True)
class Chart:
    """Describe one curve."""

    name: str
    """The name in addresses and ids."""
    title: str
    metrics: tuple[str, ...]
    unit: str = ""
    labels: tuple[str, ...] = ()
    """The names of several metrics in one chart."""
    is_share: bool = False
    """Whether the axis is from 0 to 1."""
    limit: float | None = None
    """A value from which on a verdict changes."""
    limit_word: str = ""
    shows_held_out: bool = False


REWARD = Chart("reward", "Reward", ("reward/mean",), shows_held_out=True)
# The small curves, those first that show most often why a run learns or does not.
SMALL_CHARTS = (
    Chart("silent", "Groups without a signal", ("batch/zero_signal_share",), "share",
          is_share=True),
    Chart("entropy", "Entropy of sampling", ("entropy/sampling",), "nats per token"),
    Chart("length", "Length of an answer", ("length/mean",), "tokens"),
    Chart("gradient", "Norm of the gradient", ("optim/grad_norm",)),
    Chart("gap", "Sampler and trainer differ", ("logprobs/gap",), "nats per token",
          limit=SUSPECT_LOGPROB_GAP, limit_word="suspect"),
    Chart("kl", "KL, sampler to trainer", ("kl/sampling_train",), "nats per token"),
    Chart("staleness", "Staleness", ("staleness/mean",), "updates behind"),
    Chart("seconds", "Seconds a step", ("time/rollouts", "time/train"),
          labels=("wait", "train")),
    Chart("speed", "Tokens sampled", ("tokens_per_second/sampled",), "per second"),
    Chart("invalid", "Rollouts without a usable score", ("rollouts/invalid",), "a step"),
    Chart("raised", "Groups that raised", ("rollouts/raised",), "a step"),
    Chart("truncated", "Truncated answers", ("rollouts/truncated_share",), "share",
          is_share=True),
    Chart("loss", "Loss", ("train/loss",)),
    Chart("rate", "Learning rate", ("train/learning_rate",)),
)  # fmt: skip
COMPARED_CHARTS = (
    REWARD,
    *(chart for chart in SMALL_CHARTS if chart.name in ("silent", "entropy")),
    Chart("seconds", "Seconds a step", ("time/step",)),
)
# Numbers of every step that no curve is drawn of.
COUNTERS = ("step", "time")


@dataclass(frozen=True)
class ChosenCharts:
    """Hold the curves of one run that are drawn, and the titles of flat curves that are not."""

    main: Chart | None
    small: list[Chart]
    flat: list[str]
    """Metrics that are the same in each step, with their value."""
    num_metrics: int


def choose_charts(steps: Sequence[Step]) -> ChosenCharts:
    """Return the curves that show something."""
    drawn, flat = [], []
    for chart in SMALL_CHARTS:
        values = [_list_values(steps, metric) for metric in chart.metrics]
        if not any(values):
            continue
        if len(steps) > 1 and all(is_flat(series) for series in values):
            flat.append(f"{chart.title.lower()} {format_decimal(round(values[0][0], 9))}")
        else:
            drawn.append(chart)
    names = list_metrics(steps)
    has_reward = bool(_list_values(steps, "reward/mean"))
    return ChosenCharts(REWARD if has_reward else None, drawn, flat, len(names))


def list_metrics(steps: Sequence[Step]) -> list[str]:
    """Return the names of all metrics of a run."""
    names: set[str] = set().union(*steps)
    return sorted(names.difference(COUNTERS))


def is_flat(values: Sequence[float]) -> bool:
    """Return whether all values are the same, but for rounding."""
    return max(values) - min(values) <= 1e-9 * max(1.0, abs(values[0]))


def _list_values(steps: Sequence[Step], metric: str) -> list[float]:
    return [value for step in steps if (value := step.get(metric)) is not None]
