"""Publish on Prefect's pages the verdict on a run or a test, and the states of a run's services.

Curves and answers are on our own pages, to which each flow run has a link.

An artifact is created once and then changed in place: a new version adds about ten kilobytes to
Prefect's database, and a change adds nothing. Text from a model or an environment is escaped, so
that it cannot become markup.
"""

from __future__ import annotations

import html
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lachesis.base.errors import ServerDownError
from lachesis.base.formatting import format_reward
from lachesis.prefect_client.resources import PrefectApi
from lachesis.reporting.inference_test_view import InferenceTestView
from lachesis.reporting.run_headline import write_sentence
from lachesis.reporting.run_view import RunView, describe_forecast
from lachesis.runs.folder import shorten_service_name
from lachesis.runs.metrics import MetricsFile
from lachesis.runs.record import describe_service_state

if TYPE_CHECKING:
    from lachesis.monitor.tick import WatchedRun

# Seconds that one tick spends on publishing. Runs that do not fit come first in the next tick.
MAX_PUBLISH_S = 2.5
MAX_CELL_CHARS = 600
MODEL_COLUMNS = ("model", "verdict", "mean reward", "shares", "error")


def render_run_verdict(view: RunView) -> str:
    """Return the verdict on a run as Markdown: what shows it, advice, and used budgets."""
    record, verdict = view.record, view.verdict
    lead = f"**{escape_text(verdict.lead)}** {escape_text(verdict.lead_rest)}"
    lines = [f"# {escape_text(record.title)}: {verdict.mark.word}", "", lead.strip(), ""]
    if verdict.result and verdict.result != verdict.lead_rest:
        lines.append(f"- {escape_text(verdict.result)}")
    if verdict.held_out is not None:
        lines.append(f"- {escape_text(verdict.held_out.text)}")
    lines += [f"- {escape_text(finding.text)}" for finding in verdict.findings]
    lines += [f"- Advice: {escape_text(sentence)}" for sentence in verdict.advice]
    lines += [f"- {escape_text(write_sentence(budget.describe()))}" for budget in view.budgets]
    lines += ["", _describe_tracker(view)]
    return "\n".join(lines)


def _describe_tracker(view: RunView) -> str:
    """Return where the run's metrics are in W&B."""
    if view.record.wandb_url:
        return f"[W&B]({view.record.wandb_url})"
    if view.wandb_folder:
        return f"W&B was offline; `wandb sync {view.wandb_folder}` sends it."
    return "No W&B."


def render_test_verdict(view: InferenceTestView) -> str:
    """Return the verdict on a test as Markdown: its models, what shows it, and what follows."""
    environment = view.test.request.environment
    lines = [
        f"# {escape_text(environment)}: {view.mark.word}",
        "",
        f"**{view.lead}** {escape_text(view.lead_rest)}",
        "",
        *render_table(
            MODEL_COLUMNS,
            [
                (
                    model.name,
                    model.mark.word,
                    format_reward(model.reward_mean),
                    "; ".join(share.describe() for share in model.shares),
                    model.error,
                )
                for model in view.models
            ],
        ),
        "",
    ]
    lines += [
        f"- {escape_text(model.name)}: {escape_text(sentence)}"
        for model in view.models
        for sentence in model.evidence
    ]
    if view.forecast is not None:
        lines.append(f"- {escape_text(describe_forecast(view.forecast))}")
    next_step = view.describe_next_step(*view.commands[:2])
    return "\n".join([*lines, f"- Next: {escape_text(next_step)}"])


def build_status_rows(watched: WatchedRun) -> list[dict[str, Any]]:
    """Return one table row per process of the run, and one for the run itself."""
    record, observation = watched.record, watched.observation
    waiting_for = (observation.trainer_health or {}).get("waiting_for", "")
    run_row = {
        "what": "run",
        "state": record.status,
        "process": record.flow_pid,
        "detail": f"{record.phase}; waiting for {waiting_for}" if waiting_for else record.phase,
    }
    return [run_row] + [
        {
            "what": shorten_service_name(name),
            "state": describe_service_state(service.state, record.status),
            "process": service.pid,
            # A process that has ended is gone, which its state says already.
            "detail": "" if record.has_ended else observation.process_states.get(name, ""),
        }
        for name, service in record.services.items()
    ]


def render_table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    """Return a Markdown table with escaped cells; nothing without rows."""
    if not rows:
        return []
    cells = [f"| {' | '.join(escape_text(value) for value in row)} |" for row in rows]
    return [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}", *cells]


def escape_text(text: object) -> str:
    """Return text for one line of Markdown: short and without markup."""
    plain = " ".join(str(text).split())
    if len(plain) > MAX_CELL_CHARS:
        plain = f"{plain[:MAX_CELL_CHARS]}…"
    return "".join(
        f"\\{character}" if character in "\\`*_[]|#~" else character
        for character in html.escape(plain, quote=False)
    )


def publish_runs(watched_runs: Sequence[WatchedRun]) -> int:
    """Publish the runs whose artifacts are oldest, as many as fit into the time of a tick.

    Returns:
        The number of runs that were published.

    Raises:
        ServerDownError: The Prefect server does not answer.
    """
    deadline, num_published = time.monotonic() + MAX_PUBLISH_S, 0
    with PrefectApi().reuse_connection() as api:
        for watched in sorted(
            watched_runs, key=lambda watched: (not watched.messages, watched.memory.published_at)
        ):
            is_late = time.monotonic() > deadline and not watched.record.has_ended
            if is_late or watched.record.flow_run_id is None:
                continue
            # set first, so that a run that cannot be published moves to the end of the queue
            watched.memory.published_at = time.time()
            num_published += _try_publish_run(api, watched)
    return num_published


def _try_publish_run(api: PrefectApi, watched: WatchedRun) -> bool:
    """Publish one run and return whether that worked; an error is added to the run's messages.

    Raises:
        ServerDownError: The Prefect server does not answer.
    """
    try:
        publish_run(api, watched)
    except ServerDownError:
        raise
    except Exception as error:
        watched.messages.append(f"not published: {error}")
        return False
    return True


def publish_run(api: PrefectApi, watched: WatchedRun) -> None:
    """Publish the verdict on one run and the states of its services.

    Raises:
        ServerDownError: The Prefect server does not answer.
    """
    record, run_dir = watched.record, watched.observation.run_dir
    view = RunView(record, run_dir, MetricsFile(run_dir.metrics).read())
    content: list[tuple[str, str, Any, str]] = [
        ("verdict", "markdown", render_run_verdict(view), "How the run does, and what shows it"),
        ("status", "table", build_status_rows(watched), "The run's processes"),
    ]
    for name, kind, data, caption in content:
        watched.memory.artifacts[name] = api.upsert_artifact(
            record.flow_run_id,
            key=f"{name}-{record.run_id}",
            kind=kind,
            data=data,
            description=f"{caption}: {record.environment}, run {record.run_id}",
            artifact_id=watched.memory.artifacts.get(name),
        )
    watched.is_published = True


def publish_test(view: InferenceTestView, flow_run_id: str) -> None:
    """Publish the verdict on a test that has ended.

    Raises:
        ServerDownError: The Prefect server does not answer.
    """
    PrefectApi().upsert_artifact(
        flow_run_id,
        key=f"verdict-{view.test.test_id}",
        kind="markdown",
        data=render_test_verdict(view),
        description="What the test found",
    )
