"""Run `status`, `open` and `report`: show one run."""

from __future__ import annotations

import webbrowser
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from rich.console import Group, RenderableType
from rich.text import Text

from lachesis.base.errors import RunStateError, ServerDownError
from lachesis.base.json_text import Json
from lachesis.base.timestamps import seconds_between
from lachesis.cli.options import Output, Run, Runs
from lachesis.cli.terminal import (
    HEALTH_STYLES,
    draw_sparkline,
    format_count,
    format_eta,
    format_hours,
    format_local_time,
    format_number,
    localize_times,
    make_pairs_table,
    print_answer,
    print_note,
    style_status,
)
from lachesis.operations.runs import get_results, get_run, get_run_url, get_status
from lachesis.operations.server import require_server
from lachesis.reporting.comparison import compare_runs
from lachesis.reporting.mean_rewards import count_reward_steps
from lachesis.runs.held_out_results import describe_accuracy, describe_evaluation_faults
from lachesis.runs.provenance import read_provenance
from lachesis.runs.record import describe_service_state
from lachesis.runs.store import RunStore
from lachesis.weight_agreement.parity import Parity


def status(run: Run, /, *, options: Output = Output()) -> None:
    """Print the status of a run, and its results once it has ended."""
    store = RunStore()
    answer = get_status(store, run).to_payload()
    if store.load(run).has_ended:
        answer |= get_results(store, run).to_payload()
    provenance = read_provenance(store.dir(run))
    print_answer(options, {**answer, "provenance": provenance}, render_status(answer))


def open_page(
    run: Run,
    /,
    *,
    prefect: Annotated[bool, Parameter(help="the page of its flow run in Prefect")] = False,
    options: Output = Output(),
) -> None:
    """Open the page of a run, and print its address.

    Raises:
        ServerDownError: No server of these pages runs here.
        RunStateError: The run has no page, because it was never submitted.
    """
    url = _find_prefect_page(run) if prefect else _find_page(run)
    is_opened = not options.json and webbrowser.open(url)
    text = url if is_opened else f"{url} (no browser was found here)"
    print_answer(options, {"run_id": run, "url": url}, text)


def _find_page(run_id: str) -> str:
    from lachesis.base.http_guard import load_or_create_token
    from lachesis.web.server import find_page_server
    from lachesis.web.sign_in import make_sign_in_link

    address = find_page_server()
    if address is None:
        raise ServerDownError(
            "no pages are served here; `lachesis serve` serves them beside Prefect's, and "
            "`lachesis ui` serves them alone"
        )
    return make_sign_in_link(address, load_or_create_token(), f"/runs/{run_id}")


def _find_prefect_page(run_id: str) -> str:
    store = RunStore()
    require_server(store.home)
    url = get_run_url(get_run(store, run_id))
    if url is None:
        raise RunStateError(f"run {run_id} has no page, because Prefect has never seen it")
    return url


def report(
    runs: Runs,
    /,
    *,
    to: Annotated[
        str | None,
        Parameter(
            help="a folder (default: report/ in the folder of the run; comparison/ here for "
            "several)",
            metavar="DIR",
        ),
    ] = None,
    show: Annotated[bool, Parameter("--open", help="open the page in a browser")] = False,
    options: Output = Output(),
) -> None:
    """Write the report of a run, or the comparison of several, and print its files."""
    from lachesis.web.report_file import write_comparison, write_report

    store = RunStore()
    if len(runs) > 1:
        files = [Path(to or "comparison").expanduser() / "comparison.html"]
        write_comparison(compare_runs(store, [get_run(store, run) for run in runs]), files[0])
    else:
        files = write_report(store, runs[0], Path(to).expanduser() if to else None)
    names = [str(file) for file in files]
    print_answer(options, {"files": names}, "\n".join(names))
    if show and not webbrowser.open(files[0].resolve().as_uri()):
        print_note("no browser was found here; the first file is the page")


def render_started(answer: Json) -> RenderableType:
    """Return what a user sees after a start: the run, its files, and the next commands."""
    run_id = answer["run_id"]
    return make_pairs_table(
        [
            ("run", run_id),
            ("status", style_status(answer["status"])),
            ("phase", answer["phase"]),
            ("model", answer["model"]),
            ("begins with", answer["begins_with"]),
            ("page", answer["ui_url"]),
            ("configuration", answer["config_path"]),
            (
                "next",
                f"lachesis watch {run_id}\nlachesis logs {run_id} -f\nlachesis stop {run_id}",
            ),
        ]
    )


def render_status(answer: Json) -> RenderableType:
    """Return the status of a run, with its results if they are in the answer, as a table."""
    progress = answer["progress"]
    reward = answer["metrics"]["reward_mean"]
    return make_pairs_table(
        [
            ("run", answer["run_id"]),
            ("environment", answer["environment"]),
            ("status", style_status(answer["status"])),
            ("phase", answer["phase"]),
            ("waits", answer.get("pause")),
            ("began with", answer.get("forked_from")),
            (
                "resumed",
                f"from the checkpoint of step {answer['resumed']['step']}"
                if answer.get("resumed")
                else None,
            ),
            (
                "step",
                f"{progress['step']} of {progress['total']}{format_eta(progress['eta_seconds'])}",
            ),
            ("checkpoints", _describe_checkpoints(answer)),
            ("last reward", None if reward is None else f"{reward:.3f}"),
            *_make_held_out_rows(answer),
            ("dead", "; ".join((answer.get("dead_environments") or {}).values())),
            *_make_rollout_rows(answer.get("rollouts") or {}),
            *_make_health_rows(answer.get("health") or {}),
            ("minutes", answer["running_time_minutes"]),
            ("processes", _describe_processes(answer)),
            _make_reason_row(answer),
            *(_make_result_rows(answer) if "weights" in answer else ()),
            ("warning", answer.get("warning")),
            ("page", answer["ui_url"]),
            ("next", "\n".join(answer["next_steps"])),
        ]
    )


def _describe_processes(answer: Json) -> str:
    return ", ".join(
        f"{name} {describe_service_state(state, answer['status'])}"
        for name, state in answer["processes"].items()
    )


def _describe_checkpoints(answer: Json) -> str | None:
    if not answer["checkpoints"]:
        return None
    text = f"of steps {', '.join(map(str, answer['checkpoints']))}"
    if expires_at := answer.get("checkpoints_expire_at"):
        text += f"; the server deletes the newest one at {format_local_time(expires_at)}"
    return text


def _make_reason_row(answer: Json) -> tuple[str, Any]:
    """Return why the run ended; a stop by a person or a budget is not an error."""
    if answer["status"] == "stopped":
        return ("stopped", answer.get("error"))
    return ("error", Text(answer["error"], style="red") if answer.get("error") else None)


def _make_held_out_rows(answer: Json) -> list[tuple[str, Any]]:
    """Return the newest held-out result with its curve, and failed evaluations."""
    curve, failures = answer["held_out_curve"], answer.get("evaluation")
    rows: list[tuple[str, Any]] = []
    if curve:
        newest_point = curve[-1]
        share = describe_accuracy(
            newest_point["percent_correct"],
            # An evaluation need not tell how many items it has.
            *(newest_point.get(name) for name in ("items", "low", "high")),
        )
        if len(curve) > 1:
            line = f"  {draw_sparkline([point['percent_correct'] for point in curve])}"
        else:
            line = ""
        rows.append(("held out", f"{share} at step {newest_point['step']}{line}"))
    if failures:
        rows.append(("evaluations", Text(describe_evaluation_faults(failures), style="yellow")))
    return rows


def _make_rollout_rows(counts: Json) -> list[tuple[str, Any]]:
    """Return the reasons of invalid rollouts and of rewards of 0."""
    kinds = (("invalid", "invalid_reasons"), ("worth 0", "zero_reasons"))
    reasons = {
        name: "; ".join(f"{text} ({count})" for text, count in (counts.get(key) or {}).items())
        for name, key in kinds
    }
    return [(name, text or None) for name, text in reasons.items()]


def _make_health_rows(health: Json) -> list[tuple[str, Any]]:
    """Return what the monitor has reported."""
    if not health:
        return []
    stall = health.get("stalled") or {}
    budget = ", ".join(
        f"{share:.0%} of the {name}" for name, share in (health.get("budget") or {}).items()
    )
    judgement = "; ".join([health["word"], *health.get("evidence", []), *health.get("advice", [])])
    if health.get("at"):
        age_text = f"{seconds_between(health['at']):.0f} s ago"
    else:
        age_text = None
    return [
        ("looked at", age_text),
        (
            "stalled",
            Text(
                localize_times(f"in {stall['part']} since {stall['since']}: {stall['evidence']}"),
                style="red",
            )
            if stall
            else None,
        ),
        (
            "learning",
            Text(judgement, style="" if stall else HEALTH_STYLES.get(health["word"], "")),
        ),
        ("budget", budget),
    ]


def _describe_reward_window(num_steps: float | None) -> str:
    count = count_reward_steps(int(num_steps or 1))
    return "one step each" if count == 1 else f"means over {count} steps"


def render_results(answer: Json) -> RenderableType:
    """Return what a run that has ended has reached, and how its learning is judged."""
    return make_pairs_table(
        [
            ("run", answer["run_id"]),
            ("status", style_status(answer["status"])),
            ("error", answer.get("error")),
            ("steps", answer["final_metrics"].get("step")),
            *_make_held_out_rows(answer),
            *_make_rollout_rows(answer.get("rollouts") or {}),
            *(
                row
                for row in _make_health_rows(answer.get("health") or {})
                if row[0] in ("stalled", "learning")
            ),
            *_make_result_rows(answer),
        ]
    )


def _make_result_rows(answer: Json) -> list[tuple[str, Any]]:
    """Return rewards, accuracy, duration and weights, named as in the results as JSON."""
    reward = answer["reward"]
    accuracies = _describe_held_out(answer)
    weights = answer["weights"]
    return [
        ("W&B", answer.get("wandb_url")),
        (
            "reward/mean",
            f"first {format_number(reward['first'])}, last {format_number(reward['last'])} "
            f"({_describe_reward_window(answer['final_metrics'].get('step'))})"
            if reward
            else None,
        ),
        (
            "held-out accuracy",
            ", ".join(f"{label} {value}" for label, value in accuracies.items())
            or _describe_missing_evaluation(answer),
        ),
        ("took", _describe_usage(answer)),
        (
            "W&B sync",
            f"wandb sync {Path(answer['wandb_dir']).parent}/offline-run-*"
            if answer.get("wandb_dir")
            else None,
        ),
        ("weights", weights.get("adapter") or weights.get("sampler_weights")),
        ("better weights", _describe_better_checkpoint(answer)),
    ]


def _describe_better_checkpoint(answer: Json) -> str | None:
    best = answer["weights"].get("best")
    if not best:
        return None
    command = f"`lachesis export {answer['run_id']} --checkpoint best --to DIR`"
    return f"step {best['step']}: {best['reason']}; {command} exports them"


def _describe_held_out(answer: Json) -> dict[str, str]:
    """Return the held-out accuracies as text, each with its environment if there are several."""
    held_out: Json = answer["held_out"]
    has_several = any(" " in label for label in held_out)
    descriptions = {}
    for label, accuracy in held_out.items():
        interval = answer["held_out_intervals"].get(label) or {}
        keys = ("items", "low", "high")
        if accuracy is None:
            text = "none"
        else:
            text = describe_accuracy(accuracy, *(interval.get(key) for key in keys))
        descriptions[
            label if " " in label or not has_several else f"{answer['environment']} {label}"
        ] = text
    return descriptions


def _describe_usage(answer: Json) -> str | None:
    actual = answer.get("actual")
    if not actual:
        return None
    if actual.get("cost_usd") is None:
        cost = ""
    else:
        cost = f", {actual['cost_usd']:,.2f} US dollars"
    ratio = ", ".join(
        f"{value:.2f} of the expected {key}" for key, value in actual.get("ratio", {}).items()
    )
    tokens, hours = format_count(sum(actual["tokens"].values())), format_hours(actual["hours"])
    return f"{tokens} tokens, {hours}{cost}{f' ({ratio})' if ratio else ''}"


def _describe_missing_evaluation(answer: Json) -> str | None:
    if answer["held_out_curve"]:  # It has its own row.
        return None
    if answer["status"] in ("completed", "failed", "stopped"):
        return "not evaluated"
    return "not yet"


def render_export(note: Json) -> RenderableType:
    """Return where exported weights are and how they were verified."""
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
    if pushed := note.get("pushed"):
        visibility = "private" if pushed["private"] else "public"
        rows.append(("pushed", f"{pushed['url']} ({visibility})"))
    if better := note.get("better"):
        command = f"`lachesis export {note['run_id']} --checkpoint {better['step']} --to DIR`"
        rows.append(("better", f"step {better['step']}: {better['reason']}; {command} exports it"))
    if "warning" in note:
        rows.append(("warning", note["warning"]))
    code = [Text(f"    {line}", no_wrap=True, overflow="ignore") for line in note["load"]]
    return Group(make_pairs_table(rows), "Load it in Python:", *code)
