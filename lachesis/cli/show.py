"""How answers look to a person."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group, RenderableType
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from lachesis.runs.held_out import describe_accuracy
from lachesis.runs.parity import Parity
from lachesis.runs.store import seconds_between

if TYPE_CHECKING:
    from lachesis.catalog.scan import ScanResult
    from lachesis.cli.doctor import DoctorCheck
    from lachesis.validation.tests import InferenceTest

Json = dict[str, Any]
console = Console(
    highlight=False,
    emoji=False,
    markup=False,
    width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else 140,
)
_stderr_console = Console(stderr=True, highlight=False, emoji=False, markup=False, soft_wrap=True)
_BLOCKS = "▁▂▃▄▅▆▇█"
_STATUS_STYLES = {
    "completed": "green",
    "failed": "red",
    "stopped": "yellow",
    "learnable": "green",
    "broken": "red",
}
HEALTH_STYLES = {
    "healthy": "green",
    "too early": "",
    "unknown": "",
    "not learning": "yellow",
    "suspect": "yellow",
    "broken": "red",
}
"""Of the judgement of learning: only a run that was found healthy is green."""
SHOWN_STAGES = ("import", "config", "dataset", "model-free check")
_STAGE_MARKS = {"passed": "ok", "failed": "FAILED"}


def print_answer(args: argparse.Namespace, answer: Any, view: Any) -> None:
    """JSON for a program, else `view` for a person."""
    if args.json:
        print(json.dumps(answer, indent=2, default=str))
    else:
        console.print(view)


def print_note(text: str) -> None:
    """Something for a person only; a program reads stdout."""
    _stderr_console.print(Text(text, style="dim"))


def draw_sparkline(values: Sequence[float], width: int = 40) -> str:
    """The values from 0 to 1 as blocks, the mean of equal parts when there are more than `width`."""
    if not values:
        return ""
    parts = min(width, len(values))
    bounds = [round(index * len(values) / parts) for index in range(parts + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(bounds)]
    return "".join(_BLOCKS[min(7, max(0, int(value * 8)))] for value in means)


@contextlib.contextmanager
def show_progress_bar(text: str, *, quiet: bool = False) -> Iterator[Callable[[int, int], None]]:
    """A progress bar that appears with the first step, so that nothing is shown when there is
    nothing to do.
    """
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total}"),
        TimeElapsedColumn(),
    )
    progress = Progress(*columns, console=_stderr_console, disable=quiet)
    task = progress.add_task(text, total=None, visible=False)

    def advance(done: int, total: int) -> None:
        if not progress.live.is_started:
            progress.start()
        progress.update(task, completed=done, total=total, visible=True)

    try:
        yield advance
    finally:
        progress.stop()


def _make_table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for index, column in enumerate(columns):
        table.add_column(column, overflow="fold", no_wrap=index == 0)  # names are for copying
    return table


def _make_pairs_table(rows: Sequence[tuple[str, Any]]) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in rows:
        if value not in (None, "", {}, []):
            table.add_row(name, value if isinstance(value, Text) else Text(str(value)))
    return table


def _style_status(status: str) -> Text:
    return Text(status, style=_STATUS_STYLES.get(status, "cyan"))


def render_environments(scan: ScanResult) -> RenderableType:
    table = _make_table("name", "what it is", "file")
    for environment in scan.environments:
        table.add_row(environment.name, environment.description, environment.file_path)
    problems = [
        Text(f"{file} cannot be read: {reason}", style="red")
        for file, reason in scan.problems.items()
    ]
    clashes = [Text(f"{name} is {reason}", style="yellow") for name, reason in scan.clashes.items()]
    return Group(
        table, *problems, *clashes, Text("lachesis envs NAME shows the fields of one", style="dim")
    )


def render_environment(launch_description: Json) -> RenderableType:
    table = _make_table("field", "type", "value", "what it is")
    locked = _make_table("locked field", "value", "why")
    for field in launch_description["fields"]:
        if field["locked"]:
            locked.add_row(
                f"{field['section']}.{field['name']}", str(field["current_value"]), field["locked"]
            )
        else:
            table.add_row(
                f"{field['section']}.{field['name']}",
                field["type"],
                str(field["current_value"]),
                field["description"],
            )
    warning = (
        [Text(launch_description["warning"], style="yellow")]
        if launch_description["warning"]
        else []
    )
    head = Text(
        f"{launch_description['name']} ({launch_description['class_name']}): {launch_description['description']}\n{launch_description['file_path']}\n"
    )
    return Group(head, *warning, table, Text(""), locked)


def render_started(answer: Json) -> RenderableType:
    run_id = answer["run_id"]
    return _make_pairs_table(
        [
            ("run", run_id),
            ("status", _style_status(answer["status"])),
            ("model", answer["model"]),
            ("begins with", answer["begins_with"]),
            ("page", answer["ui_url"]),
            ("configuration", answer["config_path"]),
            (
                "next",
                f"lachesis status {run_id} · lachesis logs {run_id} -f · lachesis stop {run_id}",
            ),
        ]
    )


def render_runs(rows: Sequence[Json]) -> RenderableType:
    if not rows:
        return Text("no runs yet; start one with `lachesis train ENV` or `lachesis demo`")
    widths = [max(len(row[key]) for row in rows) for key in ("environment", "status")]
    columns = (
        f"{'run':8}  {'environment':{widths[0]}}  {'status':{widths[1]}}  {'created (UTC)':16}"
    )
    lines = [Text(f"{columns}  {'learning':12}  held out", style="bold")]
    for row in rows:
        created, held_out = row["created_at"][:16].replace("T", " "), row["held_out"]
        line = Text(f"{row['run_id']}  {row['environment']:{widths[0]}}  ", no_wrap=True)
        line.append(
            f"{row['status']:{widths[1]}}  ", style=_STATUS_STYLES.get(row["status"], "cyan")
        )
        line.append(f"{created}  ").append(
            f"{row['learning']:12}", style=HEALTH_STYLES.get(row["learning"], "")
        )
        line.append(f"  {held_out['percent_correct']:.3f}" if held_out else "")
        evidence = Text(
            f"          {row['evidence'] or ''}", style="dim", no_wrap=True, overflow="ellipsis"
        )
        lines += [line, *([evidence] if row["evidence"] else [])]
    return Group(*lines)


def render_status(answer: Json) -> RenderableType:
    progress = answer["progress"]
    reward = answer["metrics"]["reward_mean"]
    return _make_pairs_table(
        [
            ("run", answer["run_id"]),
            ("environment", answer["environment"]),
            ("status", _style_status(answer["status"])),
            ("phase", answer["phase"]),
            ("began with", answer.get("forked_from")),
            (
                "resumed",
                f"from the checkpoint of step {answer['resumed']['step']}"
                if answer.get("resumed")
                else None,
            ),
            (
                "step",
                f"{progress['step']} of {progress['total']}{_format_eta(progress['eta_seconds'])}",
            ),
            (
                "checkpoints",
                f"of steps {', '.join(map(str, answer['checkpoints']))}"
                if answer["checkpoints"]
                else None,
            ),
            ("reward/mean", None if reward is None else f"{reward:.3f} in the last step"),
            *_make_held_out_rows(answer),
            ("dead", "; ".join((answer.get("dead_environments") or {}).values())),
            *_make_rollout_rows(answer.get("rollouts") or {}),
            *_make_health_rows(answer.get("health") or {}),
            ("minutes", answer["running_time_minutes"]),
            (
                "processes",
                ", ".join(f"{name} {state}" for name, state in answer["processes"].items()),
            ),
            _make_reason_row(answer),
            ("warning", answer.get("warning")),
            ("page", answer["ui_url"]),
            ("next", " · ".join(answer["next_steps"])),
        ]
    )


def _make_reason_row(answer: Json) -> tuple[str, Any]:
    """Why it ended; a stop that somebody or a budget asked for is no error."""
    if answer["status"] == "stopped":
        return ("stopped", answer.get("error"))
    return ("error", Text(answer["error"], style="red") if answer.get("error") else None)


def _make_held_out_rows(answer: Json) -> list[tuple[str, Any]]:
    """Return the newest held-out result with its curve, and what went wrong with evaluations."""
    curve, failures = answer["held_out_curve"], answer.get("evaluation")
    rows: list[tuple[str, Any]] = []
    if curve:
        newest_point = curve[-1]
        share = describe_accuracy(
            newest_point["percent_correct"],
            newest_point["items"],
            newest_point["low"],
            newest_point["high"],
        )
        line = (
            f"  {draw_sparkline([point['percent_correct'] for point in curve])}"
            if len(curve) > 1
            else ""
        )
        rows.append(("held out", f"{share} at step {newest_point['step']}{line}"))
    if failures:
        failure_text = f"{failures['failed']} failed, the last one at step {failures['last_step']}"
        rows.append(
            ("evaluations", Text(f"{failure_text}: {failures['last_reason']}", style="yellow"))
        )
    return rows


def _make_rollout_rows(counts: Json) -> list[tuple[str, Any]]:
    """Why some were not scored, or with 0."""
    kinds = (("invalid", "invalid_reasons"), ("worth 0", "zero_reasons"))
    reasons = {
        name: "; ".join(f"{text} ({count})" for text, count in (counts.get(key) or {}).items())
        for name, key in kinds
    }
    return [(name, text or None) for name, text in reasons.items()]


def _make_health_rows(health: Json) -> list[tuple[str, Any]]:
    """What the monitor has said."""
    if not health:
        return []
    stall = health.get("stalled") or {}
    budget = ", ".join(
        f"{share:.0%} of the {name}" for name, share in (health.get("budget") or {}).items()
    )
    judgement = "; ".join([health["word"], *health.get("evidence", []), *health.get("advice", [])])
    age_text = f"{seconds_between(health['at']):.0f} s ago" if health.get("at") else None
    return [
        ("looked at", age_text),
        (
            "stalled",
            Text(f"in {stall['part']} since {stall['since']}: {stall['evidence']}", style="red")
            if stall
            else None,
        ),
        ("learning", Text(judgement, style=HEALTH_STYLES.get(health["word"], ""))),
        ("budget", budget),
    ]


def _format_eta(seconds: float | None) -> str:
    return "" if seconds is None else f", about {seconds:.0f} s left"


def render_test(test: InferenceTest, next_command: str) -> RenderableType:
    """Per model its accuracy, and with prompts what was said; what comes next when a model can
    learn from it.
    """
    if test.result is None:
        return Text(f"the test failed: {test.error}", style="red")
    table = _make_table(
        "model", "verdict", "groups", "score above 0", "share (95 % interval)", "no signal", "error"
    )
    stages = " · ".join(
        f"{stage.name} {_STAGE_MARKS.get(stage.status, stage.status)}"
        for stage in test.stages
        if stage.name in SHOWN_STAGES
    )
    lines: list[RenderableType] = [Text(f"stages: {stages}", style="dim"), table]
    for model in test.result["models_tested"]:
        correct_text = f"{model['correct_completions']} of {model['total_completions']}"
        error = str(model.get("error", "")).split("\n")[0]
        verdict = model.get("verdict") or {}
        verdict_text = Text(
            verdict.get("word", ""), style=_STATUS_STYLES.get(verdict.get("word", ""), "yellow")
        )
        zero_signal_share = verdict.get("zero_signal_share")
        rates = (
            _format_share(model["accuracy"], model.get("accuracy_interval")),
            "" if zero_signal_share is None else f"{zero_signal_share:.0%}",
        )
        table.add_row(
            model["name"],
            verdict_text,
            str(model["steps_tested"]),
            correct_text,
            *rates,
            Text(error, style="red"),
        )
        lines += [
            Text(f"  {model['name']}: {sentence}")
            for sentence in verdict.get("evidence", [])
            if sentence != model.get("error")
        ]
        for prompt in model.get("prompts", []):
            responses_text = "; ".join(
                f"{response['text']!r} {_format_score(response['score'])}"
                for response in prompt["responses"]
            )
            lines.append(
                Text(
                    f"{model['name']}: {prompt['prompt']!r} -> {responses_text}{_format_note(prompt)}"
                )
            )
    summary = test.result["summary"]
    if summary.get("forecast"):
        lines.append(Text(f"forecast: {_format_forecast(summary['forecast'])}"))
    lines.append(Text(f"files: {summary['output_directory']}", style="dim"))
    if summary.get("verdict") == "learnable":
        lines.append(Text(f"next: {next_command}"))
    return Group(*lines)


def _format_forecast(forecast: Json) -> str:
    """With the number of steps that it is for; fewer or more can be had with --set total_steps=N."""
    tokens, hours, cost = forecast["tokens"], forecast["hours"], forecast.get("cost_usd")
    money = (
        f"{cost['low']:,.2f} to {cost['high']:,.2f} US dollars"
        if cost
        else "no price known for the base model"
    )
    plan_text = f"{forecast['planned']['total_steps']} steps of {forecast['planned']['batch_size']} rollouts"
    training = f"{_format_hours(hours['low'])} to {_format_hours(hours['high'])} of training"
    return f"{plan_text} take {_format_count(tokens['low'])} to {_format_count(tokens['high'])} tokens, {training}, {money}"


def _format_count(number: float) -> str:
    for size, unit in ((1e9, " billion"), (1e6, " million"), (1e3, " thousand")):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.0f}"


def _format_hours(hours: float) -> str:
    return (
        f"{hours:.1f} hours"
        if hours >= 1
        else f"{hours * 60:.0f} minutes"
        if hours * 60 >= 2
        else f"{hours * 3600:.0f} s"
    )


def _format_score(score: float | None) -> str:
    return "(no score)" if score is None else f"({score:g})"


def _format_note(prompt: Json) -> str:
    return f" [{prompt['note']}]" if prompt.get("note") else ""


def render_results(answer: Json) -> RenderableType:
    """The last lines name run, rewards, held-out accuracy and weights, as `results --json` has
    them.
    """
    reward = answer["reward"]
    return _make_pairs_table(
        [
            ("run", answer["run_id"]),
            ("status", _style_status(answer["status"])),
            ("error", answer.get("error")),
            ("steps", answer["final_metrics"].get("step")),
            ("W&B", answer.get("wandb_url")),
            (
                "reward/mean",
                f"first {_format_number(reward['first'])}, last {_format_number(reward['last'])} (means over five steps)"
                if reward
                else None,
            ),
            (
                "held-out accuracy",
                ", ".join(f"{label} {value}" for label, value in _describe_held_out(answer).items())
                or _describe_missing_evaluation(answer["status"]),
            ),
            *_make_held_out_rows(answer),
            *_make_rollout_rows(answer.get("rollouts") or {}),
            *(row for row in _make_health_rows(answer.get("health") or {}) if row[0] == "learning"),
            ("took", _describe_usage(answer)),
            (
                "W&B sync",
                f"wandb sync {Path(answer['wandb_dir']).parent}/offline-run-*"
                if answer.get("wandb_dir")
                else None,
            ),
            (
                "weights",
                answer["weights"].get("adapter") or answer["weights"].get("sampler_weights"),
            ),
            ("better weights", _describe_better_checkpoint(answer)),
        ]
    )


def _describe_better_checkpoint(answer: Json) -> str | None:
    best = answer["weights"].get("best")
    if not best:
        return None
    command = f"`lachesis weights {answer['run_id']} --checkpoint best --to DIR`"
    return f"step {best['step']}: {best['reason']}; {command} exports them"


def _describe_held_out(answer: Json) -> dict[str, str]:
    """Return the held-out accuracies in words, each with its environment where there are several."""
    held_out: Json = answer["held_out"]
    has_several = any(" " in label for label in held_out)
    descriptions = {}
    for label, accuracy in held_out.items():
        interval = answer["held_out_intervals"].get(label) or {}
        keys = ("items", "low", "high")
        text = (
            "none"
            if accuracy is None
            else describe_accuracy(accuracy, *(interval.get(key) for key in keys))
        )
        descriptions[
            label if " " in label or not has_several else f"{answer['environment']} {label}"
        ] = text
    return descriptions


def _describe_usage(answer: Json) -> str | None:
    actual = answer.get("actual")
    if not actual:
        return None
    cost = "" if actual.get("cost_usd") is None else f", {actual['cost_usd']:,.2f} US dollars"
    ratio = ", ".join(
        f"{value:.2f} of the expected {key}" for key, value in actual.get("ratio", {}).items()
    )
    return f"{_format_count(sum(actual['tokens'].values()))} tokens, {_format_hours(actual['hours'])}{cost}{f' ({ratio})' if ratio else ''}"


def _describe_missing_evaluation(status: str) -> str:
    return "not evaluated" if status in ("completed", "failed", "stopped") else "not yet"


def _format_share(share: float, interval: Json | None) -> str:
    return (
        f"{share:.3f} ({interval['low']:.2f} to {interval['high']:.2f})"
        if interval
        else f"{share:.3f}"
    )


def _format_number(value: float | None) -> str:
    return "none" if value is None else f"{value:.3f}"


def render_export(note: Json) -> RenderableType:
    rows = [("adapter", note["path"]), ("run", note["run_id"]), ("step", note["step"])]
    if "merged" in note:
        rows.append(("merged", note["merged"]))
    if "verified" in note:
        names = [name for name in ("parity_merged", "parity") if name in note]
        parities = [Parity.model_validate(note[name]) for name in names]
        parity = next(
            (candidate for candidate in parities if candidate.verified is note["verified"]),
            parities[0],
        )
        rows.append(("compared", f"{parity.verdict}: {parity.describe()}"))
    if better := note.get("better"):
        command = f"`lachesis weights {note['run_id']} --checkpoint {better['step']} --to DIR`"
        rows.append(("better", f"step {better['step']}: {better['reason']}; {command} exports it"))
    rows.append(("load", "\n".join(note["load"])))
    return _make_pairs_table(
        [*rows, *([("warning", note["warning"])] if "warning" in note else [])]
    )


def render_checks(checks: Sequence[DoctorCheck]) -> RenderableType:
    table = _make_table("", "what", "found", "how to get it")
    for check in checks:
        mark = (
            Text("ok", style="green")
            if check.ok
            else Text("not ok", style="red")
            if check.needed
            else Text("optional")
        )
        table.add_row(mark, check.name, check.found, "" if check.ok else check.remedy)
    return table
