"""The report of a run as one HTML file that needs nothing else, and its pictures as PNG files."""

from __future__ import annotations

import html
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lachesis.base.files import storage_errors, write_private
from lachesis.base.json_lines import read_json_lines
from lachesis.reporting.status import RunResults
from lachesis.runs.held_out import describe_accuracy
from lachesis.runs.metrics import MetricsFile, Step
from lachesis.runs.store import RunDir, RunRecord

Json = dict[str, Any]
SMOOTH = 10
"""Steps of the running mean that is drawn over the single steps."""
PHASES = ("time/rollouts", "time/forward_backward", "time/optim_step", "time/publish", "time/checkpoint")
BLUE, ORANGE, GREY = "#2563eb", "#d97706", "#94a3b8"
MORE_COLOURS = ("#059669", "#be185d", "#7c3aed", "#0891b2", "#65a30d", "#b45309")
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #0f172a; } h1 {
font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; border-bottom: 1px solid #e2e8f0; } table { border-collapse:
collapse; margin: .5rem 0; } td, th { padding: .2rem .8rem .2rem 0; text-align: left; vertical-align: top; } td { border-top:
1px solid #e2e8f0; } svg { max-width: 100%; height: auto; } pre { white-space: pre-wrap; margin: 0; } .word { padding: .1rem
.5rem; border-radius: .3rem; background: #e2e8f0; } .broken { background: #fecaca; } .healthy { background: #bbf7d0; } .suspect,
.not-learning { background: #fde68a; } """


def write_report(record: RunRecord, folder: RunDir, results: RunResults, to: Path) -> list[Path]:
    """Write one PNG per picture and then `report.html` into `to`; return the files, the page first. Raises StorageError."""
    steps = MetricsFile(folder.metrics).read()
    drawings = {name: draw(steps, results) for name, draw in PICTURES.items() if steps}
    with storage_errors(to):
        to.mkdir(parents=True, exist_ok=True)
        files = [to / "report.html"]
        for name, figure in drawings.items():
            files.append(to / f"{name}.png")
            figure.savefig(files[-1], dpi=120)
        page = _page(record, folder, results, steps, {name: _svg(one) for name, one in drawings.items()})
        write_private(files[0], page)  # as a whole: somebody may be reading the one before
    return files


def _svg(figure: Any) -> str:
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None})
    text = out.getvalue()
    return text[text.index("<svg") :]


# --- pictures -------------------------------------------------------------------------------------------------------


def reward(steps: Sequence[Step], results: RunResults) -> Any:
    """Mean reward per step, its running mean, and the results on held-out items with their intervals."""
    figure, axes = _axes(1)
    _line(axes[0], steps, "reward/mean", GREY, label="one step", width=0.8)
    _smooth(axes[0], steps, "reward/mean", BLUE, f"mean of {SMOOTH} steps")
    mixed = _of_environments(steps)
    _draw_held_out(axes[0], results, mixed=bool(mixed))
    for key, colour in zip(mixed, MORE_COLOURS, strict=False):
        _smooth(axes[0], steps, key, colour, key.split("/")[1])
    axes[0].set(xlabel="step", ylabel="reward/mean")
    axes[0].legend(frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def _draw_held_out(axis: Any, results: RunResults, *, mixed: bool) -> None:
    """Draw the curve of held-out results, a bar for the 95 % interval of each."""
    curve = results.held_out_curve
    if not curve:
        return
    whose = f" {results.environment}" if mixed else ""
    label = f"held out{whose}: {curve[0].percent_correct:.3f} to {curve[-1].percent_correct:.3f}"
    axis.plot(
        [point.step for point in curve], [point.percent_correct for point in curve], "o-", color=ORANGE, markersize=4,
        linewidth=1.2, label=label, zorder=3,
    )  # fmt: skip
    known = [point for point in curve if point.low is not None and point.high is not None]
    if known:
        low, high = [point.low for point in known], [point.high for point in known]
        bars = axis.vlines([point.step for point in known], low, high, color=ORANGE, alpha=0.45, linewidth=3)
        bars.set_label(f"its 95 % interval ({known[-1].items} items)")


def learning(steps: Sequence[Step], results: RunResults) -> Any:
    """What the judgement of learning looks at."""
    names = {
        "batch/zero_signal_share": "groups without a signal",
        "entropy/sampling": "entropy (nats per token)",
        "logprobs/gap": "sampling against training (nats per token)",
        "length/mean": "tokens per completion",
        "staleness/mean": "staleness (updates)",
        "weights/change": "change of the weights (nats per token)",
    }
    figure, axes = _axes(6, columns=2)
    for axis, (key, title) in zip(axes, names.items(), strict=True):
        _line(axis, steps, key, GREY, width=0.8)
        _smooth(axis, steps, key, BLUE, "")
        axis.set_title(title, fontsize=9, loc="left")
    return figure


def timing(steps: Sequence[Step], results: RunResults) -> Any:
    """Where the time of a step goes, and how many tokens pass in a second."""
    figure, axes = _axes(2)
    x = [one["step"] for one in steps]
    stacks = [[one.get(phase) or 0.0 for one in steps] for phase in PHASES]
    axes[0].stackplot(x, stacks, labels=[phase.removeprefix("time/") for phase in PHASES], alpha=0.85)
    usual = sorted(map(sum, zip(*stacks, strict=True)))[int(0.97 * (len(x) - 1))]
    axes[0].set(ylabel="seconds per step", ylim=(0, 1.5 * usual or 1))  # the first step waits for the services
    axes[0].legend(frameon=False, fontsize=8, ncols=len(PHASES), loc="upper left")
    for key, colour in (("tokens_per_second/sampled", BLUE), ("tokens_per_second/trained", ORANGE)):
        _smooth(axes[1], steps, key, colour, key.rsplit("/", 1)[1])
    axes[1].set(xlabel="step", ylabel="tokens per second")
    axes[1].legend(frameon=False, fontsize=8)
    return figure


PICTURES: dict[str, Callable[[Sequence[Step], RunResults], Any]] = {"reward": reward, "learning": learning, "timing": timing}


def _axes(count: int, columns: int = 1) -> tuple[Any, list[Any]]:
    from matplotlib.figure import Figure  # without pyplot there is no window system and no state
    from matplotlib.ticker import MaxNLocator

    rows = -(-count // columns)
    figure = Figure(figsize=(9, 3.2 if count == 1 else 1.9 * rows + 0.4), layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure, axes


def _of_environments(steps: Sequence[Step]) -> list[str]:
    """The rewards of each environment, where several feed the run."""
    return sorted({key for one in steps[:1] for key in one if key.startswith("environments/") and key.endswith("/reward_mean")})


def _known(steps: Sequence[Step], key: str) -> tuple[list[int], list[float]]:
    pairs = [(one["step"], one[key]) for one in steps if one.get(key) is not None]
    return [step for step, _ in pairs], [value for _, value in pairs]


def _line(axis: Any, steps: Sequence[Step], key: str, colour: str, *, label: str = "", width: float = 1.6) -> None:
    x, y = _known(steps, key)
    axis.plot(x, y, color=colour, linewidth=width, label=label or None)


def _smooth(axis: Any, steps: Sequence[Step], key: str, colour: str, label: str) -> None:
    x, y = _known(steps, key)
    means = [sum(y[max(0, i - SMOOTH + 1) : i + 1]) / len(y[max(0, i - SMOOTH + 1) : i + 1]) for i in range(len(y))]
    axis.plot(x, means, color=colour, linewidth=1.8, label=label or None)


# --- page -----------------------------------------------------------------------------------------------------------


def _page(record: RunRecord, folder: RunDir, results: RunResults, steps: Sequence[Step], drawings: dict[str, str]) -> str:
    health = record.health or {}
    word = record.learning
    parts = [f"<h1>{_text(record.environment)}, run {record.run_id}: {record.status}</h1>", _facts(record, results)]
    parts.append(f'<h2>Learning</h2><p><span class="word {word.replace(" ", "-")}">{_text(word)}</span> ')
    parts.append(" ".join(_text(one) for one in [*health.get("evidence", []), *health.get("advice", [])]) + "</p>")
    titles = {"reward": "Reward", "learning": "Signs of learning", "timing": "Time and speed"}
    parts += [f"<h2>{titles[name]}</h2>{drawing}" for name, drawing in drawings.items()]
    if not steps:
        parts.append("<p>No step was made.</p>")
    parts += [_curve(results), _forecast(results), _rollouts(folder), _evaluation(folder)]
    body = "\n".join(parts)
    title = f"{_text(record.environment)} {record.run_id}"
    return f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>{STYLE}</style>\n{body}</html>\n'


def _facts(record: RunRecord, results: RunResults) -> str:
    rows: list[tuple[str, Any]] = [
        ("base model", record.base_model),
        ("profile", record.profile),
        ("steps", f"{results.final_metrics.get('step', 0)} of {record.total_steps}, {record.batch_size} rollouts each"),
        ("started", record.started_at),
        ("ended", record.ended_at),
        ("reward", ", ".join(f"{name} {value}" for name, value in results.reward.items())),
        ("held out", ", ".join(f"{name} {value}" for name, value in _held_out(results).items())),
        ("weights", results.weights.adapter or results.weights.sampler_weights),
        ("W&B", record.wandb_url),
        ("error", record.error),
        ("code of the environment", record.fingerprint),
    ]
    return _table([[name, value] for name, value in rows if value])


def _held_out(results: RunResults) -> dict[str, str]:
    """Return the accuracies before and after training in words."""
    found = {}
    for name, accuracy in results.held_out.items():
        interval = results.held_out_intervals.get(name) or {}
        if accuracy is not None:
            found[name] = describe_accuracy(accuracy, *(interval.get(key) for key in ("items", "low", "high")))
    return found


def _curve(results: RunResults) -> str:
    """Return a table of the held-out results by step, and what went wrong with evaluations."""
    failures = results.evaluation
    text = f"<p>{failures['failed']} evaluations failed; the last one: {_text(failures['last_reason'])}</p>" if failures else ""
    if not results.held_out_curve:
        return f"<h2>Held-out results</h2>{text}" if text else ""
    rows: list[list[Any]] = [["step", "share correct", "items", "95 % interval"]]
    for point in results.held_out_curve:
        interval = "" if point.low is None or point.high is None else f"{point.low:.3f} to {point.high:.3f}"
        rows.append([point.step, f"{point.percent_correct:.3f}", point.items, interval])
    return f"<h2>Held-out results</h2>{_table(rows)}{text}"


def _forecast(results: RunResults) -> str:
    if not results.forecast:
        return ""
    actual = results.actual or {}
    expected = results.forecast
    rows = [["", "forecast", "actual", "actual ÷ forecast for these steps"]]
    known = {
        "tokens": ("tokens", 1, sum(actual.get("tokens", {}).values())),
        "hours": ("minutes of training", 60, actual.get("training_hours")),
        "cost_usd": ("US dollars", 1, actual.get("cost_usd")),
    }
    for key, (title, factor, real) in known.items():
        if one := expected.get(key):
            told = "" if real is None else _short(real * factor)
            low, high = _short(one["low"] * factor), _short(one["high"] * factor)
            rows.append([title, f"{low} to {high}", told, actual.get("ratio", {}).get(key, "")])
    return f"<h2>Forecast</h2>{_table(rows)}<p>From {_text(expected['basis'])}.</p>"


def _short(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def _rollouts(folder: RunDir) -> str:
    """The first and the last group that the trainer has kept."""
    kept = read_json_lines(folder.rollouts)
    if not kept:
        return ""
    shown = kept[:1] + kept[1:][-1:]
    return "<h2>Sampled rollouts</h2>" + "".join(_group(one, f"step {one.get('step')}") for one in shown)


def _group(group: Json, title: str) -> str:
    said = [one if isinstance(one, list) else [] for one in (group.get("scores"), group.get("responses"))]
    rows = [["score", "response"], *zip(*said, strict=False)]
    return f"<h3>{_text(title)}</h3><pre>{_text(group.get('prompt'))}</pre>{_table(rows)}"


def _evaluation(folder: RunDir) -> str:
    """Held-out items as they were answered before and after training."""
    answered = {which: read_json_lines(folder.evaluation / which / "samples.jsonl")[:12] for which in ("before", "after")}
    if not all(answered.values()):
        return ""
    keys = [key for key in ("question", "prompt", "answer", "model_answer", "score") if key in answered["before"][0]]
    rows: list[list[Any]] = [[f"{key}, {which}" for which in answered for key in keys]]
    pairs = zip(answered["before"], answered["after"], strict=False)
    rows += [[one.get(key) for one in pair for key in keys] for pair in pairs]
    return f"<h2>Held-out items before and after</h2>{_table(rows)}" if keys else ""


def _table(rows: Sequence[Sequence[Any]]) -> str:
    return "<table>" + "".join(f"<tr>{''.join(f'<td>{_text(one)}</td>' for one in row)}</tr>" for row in rows) + "</table>"


def _text(value: Any) -> str:
    """What a model or an environment said cannot become markup."""
    return html.escape("" if value is None else str(value))
