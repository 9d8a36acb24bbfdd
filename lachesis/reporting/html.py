"""Write the report of a run as one self-contained HTML file, and its charts as PNG files."""

from __future__ import annotations

import html
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lachesis.base.files import storage_errors, write_private
from lachesis.base.json_lines import read_json_lines
from lachesis.base.json_text import Json
from lachesis.reporting.charts import draw_learning, draw_reward, draw_timing
from lachesis.reporting.run_answers import RunResults
from lachesis.runs.held_out import describe_accuracy
from lachesis.runs.metrics import MetricsFile, Step
from lachesis.runs.run_dir import RunDir
from lachesis.runs.run_record import RunRecord

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem;
  color: #0f172a; }
h1 { font-size: 1.5rem; }
h2 { font-size: 1.15rem; margin-top: 2rem; border-bottom: 1px solid #e2e8f0; }
table { border-collapse: collapse; margin: .5rem 0; }
td, th { padding: .2rem .8rem .2rem 0; text-align: left; vertical-align: top; }
td { border-top: 1px solid #e2e8f0; }
svg { max-width: 100%; height: auto; }
pre { white-space: pre-wrap; margin: 0; }
.word { padding: .1rem .5rem; border-radius: .3rem; background: #e2e8f0; }
.broken { background: #fecaca; }
.healthy { background: #bbf7d0; }
.suspect, .not-learning { background: #fde68a; }
"""


def write_report(
    record: RunRecord, run_dir: RunDir, results: RunResults, target: Path
) -> list[Path]:
    """Write one PNG per chart and then `report.html`.

    Args:
        record: The record of the run.
        run_dir: The folder of the run.
        results: The results of the run.
        target: The folder to write to.

    Returns:
        The written files, the page first.

    Raises:
        StorageError: A file cannot be written.
    """
    steps = MetricsFile(run_dir.metrics).read()
    figures = {name: draw(steps, results) for name, draw in DRAW_FUNCTIONS.items() if steps}
    with storage_errors(target):
        target.mkdir(parents=True, exist_ok=True)
        files = [target / "report.html"]
        for name, figure in figures.items():
            files.append(target / f"{name}.png")
            figure.savefig(files[-1], dpi=120)
        page = _render_page(
            record,
            run_dir,
            results,
            steps,
            {name: _render_svg(figure) for name, figure in figures.items()},
        )
        write_private(files[0], page)  # atomic, because somebody may be reading the previous page
    return files


def _render_svg(figure: Any) -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]


DRAW_FUNCTIONS: dict[str, Callable[[Sequence[Step], RunResults], Any]] = {
    "reward": draw_reward,
    "learning": draw_learning,
    "timing": draw_timing,
}


def _render_page(
    record: RunRecord,
    run_dir: RunDir,
    results: RunResults,
    steps: Sequence[Step],
    svgs: dict[str, str],
) -> str:
    health = record.health or {}
    health_level = record.learning
    parts = [
        f"<h1>{_escape(record.environment)}, run {record.run_id}: {record.status}</h1>",
        _render_facts(record, results),
    ]
    parts.append(
        f'<h2>Learning</h2><p><span class="word '
        f'{health_level.replace(" ", "-")}">{_escape(health_level)}</span> '
    )
    parts.append(
        " ".join(
            _escape(sentence)
            for sentence in [*health.get("evidence", []), *health.get("advice", [])]
        )
        + "</p>"
    )
    titles = {"reward": "Reward", "learning": "Signs of learning", "timing": "Time and speed"}
    parts += [f"<h2>{titles[name]}</h2>{drawing}" for name, drawing in svgs.items()]
    if not steps:
        parts.append("<p>No step was made.</p>")
    parts += [
        _render_held_out_curve(results),
        _render_forecast(results),
        _render_rollouts(run_dir),
        _render_evaluation(run_dir),
    ]
    body = "\n".join(parts)
    title = f"{_escape(record.environment)} {record.run_id}"
    head = f'<meta charset="utf-8"><title>{title}</title><style>{STYLE}</style>'
    return f'<!doctype html><html lang="en">{head}\n{body}</html>\n'


def _render_facts(record: RunRecord, results: RunResults) -> str:
    rows: list[tuple[str, Any]] = [
        ("base model", record.base_model),
        ("profile", record.profile),
        (
            "steps",
            f"{results.final_metrics.get('step', 0)} of {record.total_steps}, {record.batch_size} "
            f"rollouts each",
        ),
        ("started", record.started_at),
        ("ended", record.ended_at),
        ("reward", ", ".join(f"{name} {value}" for name, value in results.reward.items())),
        (
            "held out",
            ", ".join(f"{name} {value}" for name, value in _describe_held_out(results).items()),
        ),
        ("weights", results.weights.adapter or results.weights.sampler_weights),
        ("W&B", record.wandb_url),
        ("error", record.error),
        ("code of the environment", record.fingerprint),
    ]
    return _render_table([[name, value] for name, value in rows if value])


def _describe_held_out(results: RunResults) -> dict[str, str]:
    """Return the accuracies before and after training as text."""
    descriptions = {}
    for name, accuracy in results.held_out.items():
        interval = results.held_out_intervals.get(name) or {}
        if accuracy is not None:
            descriptions[name] = describe_accuracy(
                accuracy, *(interval.get(key) for key in ("items", "low", "high"))
            )
    return descriptions


def _render_held_out_curve(results: RunResults) -> str:
    """Return a table of the held-out results by step, and a sentence about failed evaluations."""
    failures = results.evaluation
    if failures:
        failure_text = (
            f"<p>{failures['failed']} evaluations failed; the last one: "
            f"{_escape(failures['last_reason'])}</p>"
        )
    else:
        failure_text = ""
    if not results.held_out_curve:
        if failure_text:
            return f"<h2>Held-out results</h2>{failure_text}"
        return ""
    rows: list[list[Any]] = [["step", "share correct", "items", "95 % interval"]]
    for point in results.held_out_curve:
        if point.low is None or point.high is None:
            interval = ""
        else:
            interval = f"{point.low:.3f} to {point.high:.3f}"
        rows.append([point.step, f"{point.percent_correct:.3f}", point.items, interval])
    return f"<h2>Held-out results</h2>{_render_table(rows)}{failure_text}"


def _render_forecast(results: RunResults) -> str:
    if not results.forecast:
        return ""
    actual = results.actual or {}
    forecast = results.forecast
    rows = [["", "forecast", "actual", "actual ÷ forecast for these steps"]]
    quantities = {
        "tokens": ("tokens", 1, sum(actual.get("tokens", {}).values())),
        "hours": ("minutes of training", 60, actual.get("training_hours")),
        "cost_usd": ("US dollars", 1, actual.get("cost_usd")),
    }
    for key, (title, factor, actual_value) in quantities.items():
        if forecast_range := forecast.get(key):
            if actual_value is None:
                actual_text = ""
            else:
                actual_text = _format_number(actual_value * factor)
            low, high = (
                _format_number(forecast_range["low"] * factor),
                _format_number(forecast_range["high"] * factor),
            )
            rows.append(
                [title, f"{low} to {high}", actual_text, actual.get("ratio", {}).get(key, "")]
            )
    return f"<h2>Forecast</h2>{_render_table(rows)}<p>From {_escape(forecast['basis'])}.</p>"


def _format_number(number: float) -> str:
    if number >= 100:
        return f"{number:,.0f}"
    return f"{number:.3g}"


def _render_rollouts(run_dir: RunDir) -> str:
    """Return the first and the last group that the trainer has kept."""
    groups = read_json_lines(run_dir.rollouts)
    if not groups:
        return ""
    shown_groups = groups[:1] + groups[1:][-1:]
    return "<h2>Sampled rollouts</h2>" + "".join(
        _render_group(group, f"step {group.get('step')}") for group in shown_groups
    )


def _render_group(group: Json, title: str) -> str:
    columns = [
        column if isinstance(column, list) else []
        for column in (group.get("scores"), group.get("responses"))
    ]
    rows = [["score", "response"], *zip(*columns, strict=False)]
    return (
        f"<h3>{_escape(title)}</h3><pre>{_escape(group.get('prompt'))}</pre>{_render_table(rows)}"
    )


def _render_evaluation(run_dir: RunDir) -> str:
    """Return held-out items with the answers before and after training."""
    samples = {
        when: read_json_lines(run_dir.evaluation / when / "samples.jsonl")[:12]
        for when in ("before", "after")
    }
    if not all(samples.values()):
        return ""
    keys = [
        key
        for key in ("question", "prompt", "answer", "model_answer", "score")
        if key in samples["before"][0]
    ]
    rows: list[list[Any]] = [[f"{key}, {when}" for when in samples for key in keys]]
    pairs = zip(samples["before"], samples["after"], strict=False)
    rows += [[sample.get(key) for sample in pair for key in keys] for pair in pairs]
    if keys:
        return f"<h2>Held-out items before and after</h2>{_render_table(rows)}"
    return ""


def _render_table(rows: Sequence[Sequence[Any]]) -> str:
    return (
        "<table>"
        + "".join(
            f"<tr>{''.join(f'<td>{_escape(cell)}</td>' for cell in row)}</tr>" for row in rows
        )
        + "</table>"
    )


def _escape(value: object) -> str:
    """Return the value as text in which nothing is markup."""
    return html.escape("" if value is None else str(value))
