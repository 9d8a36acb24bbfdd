"""Run `status`, `open` and `report`: show one run."""

import webbrowser
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from rich.console import Group, RenderableType
from rich.text import Text

from lachesis.base.errors import RunStateError, ServerDownError
from lachesis.base.formatting import format_dollars, format_duration, format_reward, shorten_count
from lachesis.base.json_text import Json
from lachesis.base.timestamps import seconds_between
from lachesis.cli.options import Output, Run, Runs
from lachesis.cli.terminal import (
    TONE_STYLES,
    draw_sparkline,
    format_eta,
    format_local_time,
    localize_times,
    make_pairs_table,
    print_answer,
    print_note,
    style_status,
)
from lachesis.operations.runs import ObservedRun, build_status, get_run, get_run_url, observe_run
from lachesis.operations.server import require_server
from lachesis.reporting.comparison import compare_runs
from lachesis.reporting.run_schemas import build_run_results, list_process_states
from lachesis.reporting.run_view import RunView, describe_forecast
from lachesis.runs.held_out_results import (
    build_held_out_curve,
    describe_evaluation_faults,
    describe_point,
    read_held_out_points,
    split_curve,
)
from lachesis.runs.provenance import read_provenance
from lachesis.runs.record import RunRecord, describe_service_state
from lachesis.runs.store import RunStore
from lachesis.weight_agreement.parity import Parity


def status(run: Run, /, *, options: Output = Output()) -> None:
    """Print the status of a run, and its results once it has ended."""
    observed = observe_run(RunStore(), run)
    view = observed.view
    answer = build_status(observed).to_payload()
    if view.record.has_ended:
        answer |= build_run_results(view).to_payload()
    answer["provenance"] = read_provenance(view.run_dir)
    print_answer(options, answer, render_status(observed))


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
    """Return the link that opens the page of a run and signs the browser in."""
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
        files = [write_report(store, runs[0], Path(to).expanduser() if to else None)]
    names = [str(file) for file in files]
    print_answer(options, {"files": names}, "\n".join(names))
    if show and not webbrowser.open(files[0].resolve().as_uri()):
        print_note("no browser was found here; the first file is the page")


def render_started(answer: Json) -> RenderableType:
    """Return the text after a start: the run, its files, and the next commands."""
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
            ("next", f"lachesis watch {run_id}\nlachesis logs {run_id} -f\nlachesis stop {run_id}"),
        ]
    )


def render_status(observed: ObservedRun) -> RenderableType:
    """Return the status of a run, with its results once it has ended, as a table."""
    view, record = observed.view, observed.view.record
    rows = [
        ("run", record.run_id),
        ("environment", record.environment),
        ("status", style_status(record.status)),
        ("phase", observed.phase),
        ("waits", view.pause),
        ("began with", record.forked_from),
        (
            "resumed",
            f"from the checkpoint of step {record.resumed['step']}" if record.resumed else None,
        ),
        ("step", f"{view.summary.step} of {record.total_steps}{format_eta(view.eta_s)}"),
        ("checkpoints", _describe_checkpoints(view)),
        ("dead", "; ".join(record.dead_environments.values())),
        *make_verdict_rows(view),
        *_make_rollout_rows(view),
        ("budget", _describe_budgets(view)),
        ("minutes", view.running_minutes),
        ("processes", _describe_processes(record)),
        *_make_result_rows(view),
        _make_reason_row(record),
        ("warning", observed.warning),
        ("page", observed.ui_url),
        ("next", "\n".join(view.list_next_steps())),
    ]
    return make_pairs_table(rows)


def render_results(view: RunView) -> RenderableType:
    """Return the results of an ended run: rewards, held-out results, usage, weights and verdict."""
    record = view.record
    return make_pairs_table(
        [
            ("run", record.run_id),
            ("status", style_status(record.status)),
            ("error", record.error),
            ("steps", view.summary.step or None),
            *make_verdict_rows(view),
            *_make_rollout_rows(view),
            *_make_result_rows(view),
        ]
    )


def _describe_processes(record: RunRecord) -> str:
    return ", ".join(
        f"{name} {describe_service_state(state, record.status)}"
        for name, state in list_process_states(record).items()
    )


def _describe_checkpoints(view: RunView) -> str | None:
    if not view.manifests:
        return None
    text = f"of steps {', '.join(str(manifest.step) for manifest in view.manifests)}"
    if expires_at := view.manifests[-1].expires_at:
        text += f"; the server deletes the newest one at {format_local_time(expires_at)}"
    return text


def _make_reason_row(record: RunRecord) -> tuple[str, Any]:
    """Return why the run ended; a stop by a person or a budget is not an error."""
    if record.status == "stopped":
        return ("stopped", record.error)
    return ("error", Text(record.error, style="red") if record.error else None)


def make_verdict_rows(view: RunView) -> list[tuple[str, Any]]:
    """Return the word for the run with its evidence, its stall, and how it went in a sentence."""
    record, health = view.record, view.record.health or {}
    mark, stall = view.verdict.mark, record.stall
    words = [mark.word, *map(str, health.get("evidence", [])), *map(str, health.get("advice", []))]
    stalled = None
    if stall:
        text = f"in {stall['part']} since {stall['since']}: {stall['evidence']}"
        stalled = Text(localize_times(text), style="red")
    is_judged = bool(health) or record.has_ended
    age = f"{seconds_between(health['at']):.0f} s ago" if health.get("at") else None
    return [
        ("looked at", None if record.has_ended else age),
        ("stalled", stalled),
        ("verdict", Text("; ".join(words), style=TONE_STYLES[mark.tone]) if is_judged else None),
        ("result", view.verdict.result),
    ]


def _make_rollout_rows(view: RunView) -> list[tuple[str, Any]]:
    """Return the reasons of invalid rollouts and of rewards of 0, and failed evaluations."""
    kinds = (("invalid", "invalid_reasons"), ("worth 0", "zero_reasons"))
    counts = view.rollout_reasons or {}
    rows: list[tuple[str, Any]] = [
        (name, "; ".join(f"{text} ({count})" for text, count in (counts.get(key) or {}).items()))
        for name, key in kinds
    ]
    if view.evaluation_faults:
        faults = Text(describe_evaluation_faults(view.evaluation_faults), style="yellow")
        rows.append(("evaluations", faults))
    return rows


def _describe_budgets(view: RunView) -> str:
    return ", ".join(
        f"{budget.used / budget.limit:.0%} of the {budget.unit}" for budget in view.budgets
    )


def _make_result_rows(view: RunView) -> list[tuple[str, Any]]:
    """Return rewards, held-out results, usage and weights."""
    record, weights = view.record, view.weights
    return [
        ("W&B", record.wandb_url),
        ("reward", _describe_reward(view)),
        *_make_held_out_rows(view),
        ("took", _describe_usage(view)),
        ("forecast", _describe_forecast(view)),
        (
            "W&B sync",
            f"wandb sync {Path(view.wandb_folder).parent}/offline-run-*"
            if view.wandb_folder and not record.wandb_url
            else None,
        ),
        ("weights", weights.adapter or weights.sampler_weights),
        ("better weights", _describe_better_checkpoint(view)),
    ]


def _describe_reward(view: RunView) -> str | None:
    reward, count = view.summary.reward, view.summary.reward_steps
    if not reward:
        return None
    window = "one step each" if count == 1 else f"means over {count} steps"
    first, last = format_reward(reward["first"]), format_reward(reward["last"])
    return f"first {first}, last {last} ({window})"


def _make_held_out_rows(view: RunView) -> list[tuple[str, str]]:
    """Return the held-out results of each environment, before training and the newest after it."""
    record, points = view.record, read_held_out_points(view.record, view.steps)
    rows = []
    for name in (record.environment, *record.additional_environments):
        is_own = name == record.environment
        curve = build_held_out_curve(view.steps, None if is_own else name)
        prefix = "" if is_own else f"{name} "
        before, after = split_curve(curve)
        before = before or points.get(f"{prefix}before")
        after = after or points.get(f"{prefix}after")
        title = f"{name}, held out" if record.additional_environments else "held out"
        if before is not None:
            rows.append((f"{title} before", describe_point(before)))
        if after is not None:
            line = draw_sparkline([point.percent_correct for point in curve])
            text = f"{describe_point(after)} at step {after.step}"
            rows.append((f"{title} after", f"{text}  {line}" if len(curve) > 1 else text))
    if not rows and view.steps:
        rows.append(("held out", "not evaluated" if record.has_ended else "not yet"))
    return rows


def _describe_usage(view: RunView) -> str | None:
    """Return the tokens, time and cost of a run in words, and their ratios to the forecast."""
    actual, usage = view.actual, view.usage
    if actual is None:
        return None
    names = {"tokens": "tokens", "hours": "time", "cost_usd": "cost"}
    ratio = ", ".join(f"{actual.ratio[key]:.2f} of the forecast {names[key]}"
                      for key in names if key in actual.ratio)  # fmt: skip
    cost = "" if usage.cost_usd is None else f", {format_dollars(usage.cost_usd)}"
    tokens, time = shorten_count(usage.tokens), format_duration(usage.hours * 3600)
    return f"{tokens} tokens, {time}{cost}{f' ({ratio})' if ratio else ''}"


def _describe_forecast(view: RunView) -> str | None:
    return None if view.forecast is None else describe_forecast(view.forecast)


def _describe_better_checkpoint(view: RunView) -> str | None:
    best = view.weights.best
    if best is None:
        return None
    command = f"`lachesis export {view.record.run_id} --checkpoint best --to DIR`"
    return f"step {best.step}: {best.reason}; {command} exports them"


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
