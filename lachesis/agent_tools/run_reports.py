"""Report on runs to an agent: status with its limit, results, lists, and rollouts."""

import time
from typing import Any, Literal

from lachesis.agent_tools.answer_size import take_page
from lachesis.agent_tools.answers import NEXT_STEP_CALLS, drop_empty
from lachesis.agent_tools.session import AgentSession, LastReport
from lachesis.base.formatting import keep_ends
from lachesis.base.json_text import Json
from lachesis.config.value_parsing import read_env_number
from lachesis.operations import runs
from lachesis.operations.run_lists import list_runs_with_warning
from lachesis.rollouts.search import RolloutQuery, describe_found, find_rollouts

# Characters of each text that an answer holds: its head and its tail.
MAX_TEXT_CHARACTERS = 2000
RUN_FIELDS = {"run_id", "environment", "status", "wandb_run_name", "profile", "created_at"}


def get_status_interval_s() -> float:
    """Return the minimum seconds between two live reports about the same run.

    Raises:
        ConfigError: $LACHESIS_STATUS_INTERVAL_S is not a valid number.
    """
    return read_env_number("LACHESIS_STATUS_INTERVAL_S", 1800, min_value=0)


def report_live_status(session: AgentSession, run_id: str) -> Json:
    """Return a live report about a run."""
    return runs.get_status(session.store, run_id, NEXT_STEP_CALLS).to_payload()


def report_status(session: AgentSession, run_id: str) -> Json:
    """Return a live report, at most one per run and interval while only its numbers change.

    A run that has ended is always reported.
    """
    report = report_live_status(session, run_id)  # An unknown id does not use up the limit.
    if report["status"] in ("completed", "failed", "stopped"):
        return report
    interval_s = get_status_interval_s()
    with session.session_file.change() as state:
        last = state.last_reports.get(run_id)
        if last is not None:
            remaining_s = last.reported_at + interval_s - time.time()
            if remaining_s > 0 and _get_change_key(report) == _get_change_key(last.report):
                return _repeat_report(last, remaining_s)
        state.last_reports[run_id] = LastReport(reported_at=time.time(), report=report)
    return report


def _repeat_report(last: LastReport, remaining_s: float) -> Json:
    """Return the last report again, with the time when a new one is due."""
    next_check_s, age_s = max(1, round(remaining_s)), round(time.time() - last.reported_at)
    stall = (last.report.get("health") or {}).get("stalled")
    if stall:
        outlook = f"The run has stalled in {stall['part']}; what happens next is reported at once"
    else:
        outlook = (
            "The run continues by itself; a stall, a new judgement and its end are reported at once"
        )
    return {
        **last.report,
        "rate_limited": True,
        "message": f"this is the report of {age_s} s ago; the next live one is due in "
        f"{next_check_s} s. {outlook}",
        "next_check_in_seconds": next_check_s,
        "reported_seconds_ago": age_s,
    }


def _get_change_key(report: Json) -> tuple[Any, ...]:
    """Return the parts of a report whose change is reported at once.

    It is the status, the phase, whether the end can be estimated, the word of the judgement, and
    the part that has stalled.
    """
    health = report.get("health") or {}
    return (
        report.get("status"),
        report.get("phase"),
        (report.get("progress") or {}).get("eta_seconds") is None,
        health.get("word"),
        (health.get("stalled") or {}).get("part"),
    )


def forget_last_report(session: AgentSession, run_id: str) -> None:
    """Make the next report live, because the last one describes an earlier state of the run."""
    with session.session_file.change() as state:
        state.last_reports.pop(run_id, None)


def report_results(session: AgentSession, run_id: str) -> Json:
    """Return the rewards, held-out results and weights of a run."""
    return runs.get_results(session.store, run_id, NEXT_STEP_CALLS).to_payload()


def list_runs(session: AgentSession, limit: int | None, cursor: int) -> Json:
    """Return the runs of this home, not only those of this session, the newest first."""
    records, warning = list_runs_with_warning(session.store)
    entries = [
        {
            **record.model_dump(mode="json", include=RUN_FIELDS),
            "learning": record.learning,
            "evidence": record.evidence,
            "stalled": record.stall_text,
        }
        for record in records[cursor : None if limit is None else cursor + limit]
    ]
    page, following = take_page(entries, 0)
    next_cursor = None if following is None else cursor + following
    return {
        "runs": page,
        "count": len(records),
        **drop_empty(warning=warning, next_cursor=next_cursor),
    }


def get_rollouts(
    session: AgentSession,
    run_id: str,
    step: int | None,
    order: Literal["worst", "best", "first", "invalid"],
    item: str | None,
    limit: int,
    cursor: int,
) -> Json:
    """Return rollouts of a run; the arguments are those of `lachesis.rollouts.search.RolloutQuery`,
    and how many rollouts of earlier answers to leave out.

    Raises:
        LachesisError: There is no such run, or the query is not allowed.
    """
    record = session.store.load(run_id)
    if order == "invalid":
        query = RolloutQuery(step=step, invalid=True, item=item, limit=limit)
    else:
        query = RolloutQuery(step=step, order=order, item=item, limit=limit)
    found = find_rollouts(session.store.dir(record.run_id).rollouts, query)
    rollouts, next_cursor = take_page([_cut_texts(row) for row in found.rollouts], cursor)
    return {
        "run_id": record.run_id,
        "message": describe_found(found),
        "rollouts": rollouts,
        **drop_empty(next_cursor=next_cursor),
    }


def _cut_texts(rollout: Json) -> Json:
    """Return a rollout with the head and the tail of its long texts, and which those are."""
    long_names = [
        name
        for name, value in rollout.items()
        if isinstance(value, str) and len(value) > MAX_TEXT_CHARACTERS
    ]
    cut = {name: keep_ends(rollout[name], MAX_TEXT_CHARACTERS) for name in long_names}
    return {**rollout, **cut, **({"truncated_fields": long_names} if long_names else {})}
