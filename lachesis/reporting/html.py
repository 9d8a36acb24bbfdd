"""Write the report of a run as one self-contained HTML file, and its charts as PNG files.

The page is the template `report.html.j2`; this module gathers what it shows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lachesis.base.errors import LachesisError
from lachesis.base.files import storage_errors, write_private
from lachesis.base.json_lines import read_json_lines
from lachesis.base.json_text import Json
from lachesis.reporting.charts import draw_learning, draw_reward, draw_timing
from lachesis.reporting.run_answers import RunResults
from lachesis.reporting.templates import render_svg, render_template
from lachesis.runs.evaluation_results import describe_evaluation_faults
from lachesis.runs.held_out import describe_accuracy
from lachesis.runs.metrics import MetricsFile, Step
from lachesis.runs.provenance import read_provenance
from lachesis.runs.rollout_files import list_rollout_files
from lachesis.runs.rollouts import RolloutQuery, find_rollouts
from lachesis.runs.run_dir import RunDir
from lachesis.runs.run_record import RunRecord

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CHARTS: dict[str, tuple[str, Callable[[Sequence[Step], RunResults], Figure]]] = {
    "reward": ("Reward", draw_reward),
    "learning": ("Signs of learning", draw_learning),
    "timing": ("Time and speed", draw_timing),
}
# Held-out items whose answers are shown.
MAX_SAMPLES = 12
MAX_SHOWN_ROLLOUTS = 4
SAMPLE_FIELDS = ("question", "prompt", "answer", "model_answer", "score")


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
    figures = {name: draw(steps, results) for name, (_, draw) in CHARTS.items() if steps}
    with storage_errors(target):
        target.mkdir(parents=True, exist_ok=True)
        files = [target / "report.html"]
        for name, figure in figures.items():
            files.append(target / f"{name}.png")
            figure.savefig(files[-1], dpi=120)
        drawings = [(CHARTS[name][0], render_svg(figure)) for name, figure in figures.items()]
        # Written atomically, because somebody may be reading the previous page.
        write_private(files[0], _render_page(record, run_dir, results, drawings))
    return files


def _render_page(
    record: RunRecord, run_dir: RunDir, results: RunResults, drawings: list[tuple[str, str]]
) -> str:
    health = record.health or {}
    return render_template(
        "report.html.j2",
        record=record,
        facts=_list_facts(record, results),
        provenance=[row for row in _list_provenance(record, run_dir) if row[1] not in (None, "")],
        sentences=[*health.get("evidence", []), *health.get("advice", [])],
        drawings=drawings,
        held_out_rows=_list_held_out_results(results),
        failures=describe_evaluation_faults(results.evaluation or {}),
        forecast=results.forecast,
        forecast_rows=_list_forecast(results),
        groups=_list_groups(run_dir),
        sample_rows=_list_samples(run_dir),
    )


def _list_facts(record: RunRecord, results: RunResults) -> list[tuple[str, Any]]:
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
    return [(name, value) for name, value in rows if value]


def _list_provenance(record: RunRecord, run_dir: RunDir) -> list[tuple[str, Any]]:
    """Return what the run is made of: command, code, model, data, packages and machine."""
    provenance = read_provenance(run_dir)
    if provenance is None:
        return []
    machine = provenance["machine"]
    sources = provenance["environments"].items()
    model = provenance["model"]
    return [
        ("command", provenance["command"]),
        ("seed", record.seed),
        ("Lachesis", _describe_version(provenance["lachesis"])),
        *((f"code of {name}", _describe_version(source)) for name, source in sources),
        ("model", model.get("revision") or model.get("folder")),
        *((f"data {file}", digest) for file, digest in provenance["data"].items()),
        ("packages", ", ".join(" ".join(item) for item in provenance["packages"].items())),
        ("Python", machine["python"]),
        (
            "machine",
            f"{machine['cpu_cores']} cores, {machine['memory_gb']} GB, {machine['system']}",
        ),
        ("GPUs", ", ".join(machine["gpus"])),
    ]


def _describe_version(source: Json) -> str:
    """Return the file or the version, and the git commit with whether it was changed."""
    place = str(source.get("file") or source.get("version"))
    if "commit" not in source:
        return place
    changed = ", with changes that are not committed" if source["changed"] else ""
    return f"{place}, commit {source['commit'][:12]}{changed}"


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


def _list_held_out_results(results: RunResults) -> list[list[Any]]:
    """Return a row per held-out result: step, share, items, and interval."""
    rows: list[list[Any]] = []
    for point in results.held_out_curve:
        interval = ""
        if point.low is not None and point.high is not None:
            interval = f"{point.low:.3f} to {point.high:.3f}"
        rows.append([point.step, f"{point.percent_correct:.3f}", point.items, interval])
    return rows


def _list_forecast(results: RunResults) -> list[list[Any]]:
    """Return a row per quantity of the forecast, beside what the run has taken."""
    forecast, actual = results.forecast or {}, results.actual or {}
    quantities = {
        "tokens": ("tokens", 1, sum(actual.get("tokens", {}).values())),
        "hours": ("minutes of training", 60, actual.get("training_hours")),
        "cost_usd": ("US dollars", 1, actual.get("cost_usd")),
    }
    rows = []
    for key, (title, factor, actual_value) in quantities.items():
        if not (forecast_range := forecast.get(key)):
            continue
        actual_text = "" if actual_value is None else _format_number(actual_value * factor)
        low = _format_number(forecast_range["low"] * factor)
        high = _format_number(forecast_range["high"] * factor)
        rows.append([title, f"{low} to {high}", actual_text, actual.get("ratio", {}).get(key, "")])
    return rows


def _format_number(number: float) -> str:
    if number >= 100:
        return f"{number:,.0f}"
    return f"{number:.3g}"


def _list_groups(run_dir: RunDir) -> list[Json]:
    """Return a group of the first and of the last step whose rollouts are kept."""
    files = list_rollout_files(run_dir.rollouts)
    if not files:
        return _list_sampled_groups(run_dir)
    steps = dict.fromkeys([files[0].first_step, files[-1].last_step])
    return [group for step in steps if (group := _read_group(run_dir, step))]


def _read_group(run_dir: RunDir, step: int) -> Json | None:
    """Return some rollouts of the first group of a step, or None if they cannot be read."""
    try:
        found = find_rollouts(run_dir.rollouts, RolloutQuery(step=step, limit=MAX_SHOWN_ROLLOUTS))
    except LachesisError:
        return None
    rollouts = [row for row in found.rollouts if row["group"] == found.rollouts[0]["group"]]
    answers = [(row["score"], row["answer"]) for row in rollouts]
    return {"step": step, "prompt": rollouts[0]["prompt"], "answers": answers}


def _list_sampled_groups(run_dir: RunDir) -> list[Json]:
    """Return the first and the last group that a run of 0.1.0 has kept as text."""
    groups = read_json_lines(run_dir.sampled_groups)
    return [
        {
            "step": group.get("step"),
            "prompt": group.get("prompt"),
            "answers": _pair_answers(group),
        }
        for group in groups[:1] + groups[1:][-1:]
    ]


def _pair_answers(group: Json) -> list[tuple[Any, Any]]:
    """Return the score and the text of each answer; a damaged file may hold anything else."""
    scores, responses = group.get("scores"), group.get("responses")
    if not isinstance(scores, list) or not isinstance(responses, list):
        return []
    return list(zip(scores, responses, strict=False))


def _list_samples(run_dir: RunDir) -> list[list[Any]]:
    """Return held-out items with the answers before and after training, with a row of titles."""
    samples = {
        when: read_json_lines(run_dir.evaluation / when / "samples.jsonl")[:MAX_SAMPLES]
        for when in ("before", "after")
    }
    if not all(samples.values()):
        return []
    keys = [key for key in SAMPLE_FIELDS if key in samples["before"][0]]
    if not keys:
        return []
    rows: list[list[Any]] = [[f"{key}, {when}" for when in samples for key in keys]]
    pairs = zip(samples["before"], samples["after"], strict=False)
    rows += [[sample.get(key) for sample in pair for key in keys] for pair in pairs]
    return rows
