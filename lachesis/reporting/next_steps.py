"""Choose the next steps for a run now, as commands or calls of the asking user interface.

Each step that is offered works: no resume that a used-up budget refuses, and the log of the process
that can tell something.
"""

import shlex
from collections.abc import Mapping

from lachesis.base.errors import LachesisError
from lachesis.checkpoints.manifests import Checkpoints
from lachesis.runs.end_causes import CAUSES
from lachesis.runs.ending import find_end_cause
from lachesis.runs.folder import RunDir, shorten_service_name
from lachesis.runs.record import RunRecord
from lachesis.runs.store import read_effective_config
from lachesis.runs.suggested_commands import find_environment
from lachesis.spending.budgets import find_exceeded_limit, read_budget_usage

# Next steps as shell commands. Another user interface has its own texts for the same keys.
NEXT_STEP_COMMANDS = {
    "status": "lachesis status {run}",
    "logs": "lachesis logs {run} {service}",
    "stop": "lachesis stop {run}",
    "resume": "lachesis resume {run}",
    "raise_budget": "lachesis resume {run} --set limits.{limit}={value}",
    "check": "lachesis env check {environment}",
    "weights": "lachesis export {run} --to DIR",
    "report": "lachesis report {run}",
}


def list_next_steps(record: RunRecord, run_dir: RunDir, templates: Mapping[str, str]) -> list[str]:
    """Return the next steps in the order in which a user would take them.

    Args:
        record: The run.
        run_dir: Its folder.
        templates: The text for each key of `NEXT_STEP_COMMANDS`, and for `results` where an
            interface shows them apart from the status; a missing one is left out.
    """
    values = {
        "run": record.run_id,
        "service": _choose_service(record),
        "environment": shlex.quote(find_environment(record)),
    }
    keys = ["status", "stop"] if record.status == "pending" else ["status", "logs", "stop"]
    if record.has_ended:
        resume_key, resume_values = _choose_resume(record, run_dir)
        values |= resume_values
        keys = _list_keys_after_end(record, run_dir, resume_key)
    return [templates[key].format(**values) for key in keys if key in templates]


def _list_keys_after_end(record: RunRecord, run_dir: RunDir, resume_key: str) -> list[str]:
    """Return the keys of the next steps that an ended run offers."""
    is_offered = {
        "logs": record.status == "failed",
        resume_key: bool(resume_key),
        "results": True,
        "report": True,
        "weights": bool(Checkpoints(run_dir.checkpoints).list_intact()),
    }
    return [key for key, offered in is_offered.items() if offered]


def _choose_service(record: RunRecord) -> str:
    """Return the service whose log to read first: the service that failed or stands still."""
    stalled_part = (record.stall or {}).get("part", "")
    if record.failed_service:
        service = record.failed_service
    elif stalled_part in record.services:
        service = stalled_part
    else:
        service = "trainer"
    return shorten_service_name(service)


def _choose_resume(record: RunRecord, run_dir: RunDir) -> tuple[str, dict[str, str]]:
    """Return the key of the step that resumes an ended run, with its values; the key may be
    empty."""
    next_step = CAUSES[find_end_cause(record)].next_step
    if next_step in ("check", ""):
        return next_step, {}
    try:
        Checkpoints(run_dir.checkpoints).find_resumable()
        limits = read_effective_config(run_dir).limits
    except LachesisError:
        return "", {}
    exceeded = find_exceeded_limit(limits, read_budget_usage(run_dir, record))
    if exceeded is None:
        return "resume", {}
    return "raise_budget", {"limit": exceeded.field, "value": exceeded.propose_limit()}
