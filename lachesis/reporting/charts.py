"""Draw the charts of a run: its rewards, its learning, and its timing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lachesis.reporting.run_schemas import RunResults
from lachesis.runs.metrics import Step

# Steps of the moving average that is drawn over the single steps.
SMOOTHING_STEPS = 10
TIMING_KEYS = (
    "time/rollouts",
    "time/forward_backward",
    "time/optim_step",
    "time/publish",
    "time/checkpoint",
)
BLUE, ORANGE, GREY = "#2563eb", "#d97706", "#94a3b8"
MORE_COLOURS = ("#059669", "#be185d", "#7c3aed", "#0891b2", "#65a30d", "#b45309")


def draw_reward(steps: Sequence[Step], results: RunResults) -> Any:
    """Draw the mean reward per step, its moving average, and the held-out results with their
    intervals.
    """
    figure, axes = _make_axes(1)
    _plot_line(axes[0], steps, "reward/mean", GREY, label="one step", width=0.8)
    _plot_running_mean(axes[0], steps, "reward/mean", BLUE, f"mean of {SMOOTHING_STEPS} steps")
    environment_keys = _find_environment_keys(steps)
    _draw_held_out(axes[0], results, is_mixture=bool(environment_keys))
    for key, colour in zip(environment_keys, MORE_COLOURS, strict=False):
        _plot_running_mean(axes[0], steps, key, colour, key.split("/")[1])
    axes[0].set(xlabel="step", ylabel="reward/mean")
    axes[0].legend(frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def _draw_held_out(axis: Any, results: RunResults, *, is_mixture: bool) -> None:
    """Draw the held-out results, each with a bar for its 95 % interval."""
    curve = results.held_out_curve
    if not curve:
        return
    environment_suffix = f" {results.environment}" if is_mixture else ""
    first, last = curve[0].percent_correct, curve[-1].percent_correct
    label = f"held out{environment_suffix}: {first:.3f} to {last:.3f}"
    axis.plot(
        [point.step for point in curve], [point.percent_correct for point in curve], "o-",
        color=ORANGE, markersize=4,
        linewidth=1.2, label=label, zorder=3,
    )  # fmt: skip
    points_with_interval = [
        point for point in curve if point.low is not None and point.high is not None
    ]
    if points_with_interval:
        low, high = (
            [point.low for point in points_with_interval],
            [point.high for point in points_with_interval],
        )
        bars = axis.vlines(
            [point.step for point in points_with_interval],
            low,
            high,
            color=ORANGE,
            alpha=0.45,
            linewidth=3,
        )
        bars.set_label(f"its 95 % interval ({points_with_interval[-1].items} items)")


def draw_learning(steps: Sequence[Step], results: RunResults) -> Any:
    """Draw the metrics that the judgement of learning uses."""
    names = {
        "batch/zero_signal_share": "groups without a signal",
        "entropy/sampling": "entropy (nats per token)",
        "logprobs/gap": "sampling against training (nats per token)",
        "length/mean": "tokens per completion",
        "staleness/mean": "staleness (updates)",
        "weights/change": "change of the weights (nats per token)",
    }
    figure, axes = _make_axes(6, columns=2)
    for axis, (key, title) in zip(axes, names.items(), strict=True):
        _plot_line(axis, steps, key, GREY, width=0.8)
        _plot_running_mean(axis, steps, key, BLUE, "")
        axis.set_title(title, fontsize=9, loc="left")
    return figure


def draw_timing(steps: Sequence[Step], results: RunResults) -> Any:
    """Draw where the time of a step goes, and the tokens per second."""
    figure, axes = _make_axes(2)
    x = [step["step"] for step in steps]
    stacks = [[step.get(phase) or 0.0 for step in steps] for phase in TIMING_KEYS]
    axes[0].stackplot(
        x, stacks, labels=[phase.removeprefix("time/") for phase in TIMING_KEYS], alpha=0.85
    )
    usual_step_s = sorted(map(sum, zip(*stacks, strict=True)))[int(0.97 * (len(x) - 1))]
    # the first step waits for the services
    axes[0].set(ylabel="seconds per step", ylim=(0, 1.5 * usual_step_s or 1))
    axes[0].legend(frameon=False, fontsize=8, ncols=len(TIMING_KEYS), loc="upper left")
    for key, colour in (("tokens_per_second/sampled", BLUE), ("tokens_per_second/trained", ORANGE)):
        _plot_running_mean(axes[1], steps, key, colour, key.rsplit("/", 1)[1])
    axes[1].set(xlabel="step", ylabel="tokens per second")
    axes[1].legend(frameon=False, fontsize=8)
    return figure


def _make_axes(count: int, columns: int = 1) -> tuple[Any, list[Any]]:
    from matplotlib.figure import Figure  # without pyplot there is no window system and no state
    from matplotlib.ticker import MaxNLocator

    rows = -(-count // columns)
    figure = Figure(figsize=(9, 3.2 if count == 1 else 1.9 * rows + 0.4), layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure, axes


def _find_environment_keys(steps: Sequence[Step]) -> list[str]:
    """Return the metric keys of each environment's reward, if several environments feed the run."""
    return sorted(
        {
            key
            for step in steps[:1]
            for key in step
            if key.startswith("environments/") and key.endswith("/reward_mean")
        }
    )


def _select_series(steps: Sequence[Step], key: str) -> tuple[list[int], list[float]]:
    pairs = [(step["step"], step[key]) for step in steps if step.get(key) is not None]
    return [step for step, _ in pairs], [value for _, value in pairs]


def _plot_line(
    axis: Any, steps: Sequence[Step], key: str, colour: str, *, label: str = "", width: float = 1.6
) -> None:
    x, y = _select_series(steps, key)
    axis.plot(x, y, color=colour, linewidth=width, label=label or None)


def _plot_running_mean(axis: Any, steps: Sequence[Step], key: str, colour: str, label: str) -> None:
    x, y = _select_series(steps, key)
    axis.plot(x, _compute_running_mean(y), color=colour, linewidth=1.8, label=label or None)


def _compute_running_mean(values: Sequence[float]) -> list[float]:
    """Return the mean of each value and of those before it, SMOOTHING_STEPS in all."""
    windows = [values[max(0, i - SMOOTHING_STEPS + 1) : i + 1] for i in range(len(values))]
    return [sum(window) / len(window) for window in windows]
