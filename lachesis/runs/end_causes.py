"""Name the causes for which a run ends, with what follows from each.

docs/reference/ends.md shows the table. `lachesis.runs.ending` writes a cause into the
record; everything else asks for the cause and compares no text.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

EndStatus = Literal["completed", "stopped", "failed"]
# What helps after an end: to resume the run, to raise its budget first, to mend the environment
# and check it first, or nothing.
NextStep = Literal["resume", "raise_budget", "check", ""]


class EndCause(StrEnum):
    """Name the reasons for which an attempt of a run ends."""

    COMPLETED = "completed"
    PERSON = "person"
    AGENT = "agent"
    PREFECT = "prefect"
    SUSPENDED = "suspended"
    SERVE_ENDED = "serve_ended"
    SIGNAL = "signal"
    BUDGET = "budget"
    STALLED = "stalled"
    BROKEN_LEARNING = "broken_learning"
    NO_MORE_ITEMS = "no_more_items"
    SERVER = "server"
    SKIPPED = "skipped"
    INVALID_GROUPS = "invalid_groups"
    NOT_VALIDATED = "not_validated"
    FAILED = "failed"
    SERVE_LOST = "serve_lost"
    FLOW_LOST = "flow_lost"
    HOST_LOST = "host_lost"
    NEVER_SUBMITTED = "never_submitted"


@dataclass(frozen=True)
class EndRule:
    """Hold the consequences of a cause: status, sentence, Prefect's state, and the next step."""

    status: EndStatus
    sentence: str
    """Tells a person why, where nothing more is known."""
    prefect_state: str
    """The name of the final state of the flow run; empty if there is no flow run."""
    next_step: NextStep = "resume"
    is_crash: bool = False
    """Whether `limits.on_crash` acts."""
    is_wanted: bool = False
    """Whether whoever sees the end has asked for it, so that no reason need be given."""


CAUSES: dict[EndCause, EndRule] = {
    EndCause.COMPLETED: EndRule("completed", "completed", "Completed", "", is_wanted=True),
    EndCause.PERSON: EndRule("stopped", "stopped by its user", "Cancelled", is_wanted=True),
    EndCause.AGENT: EndRule("stopped", "stopped by an agent", "Cancelled", is_wanted=True),
    EndCause.PREFECT: EndRule("stopped", "cancelled in Prefect", "Cancelled"),
    EndCause.SUSPENDED: EndRule(
        "stopped",
        "suspended in Prefect; Retry on its page, or `lachesis resume`, goes on",
        "Cancelled",
    ),
    EndCause.SERVE_ENDED: EndRule(
        "stopped", "`lachesis serve` was ended; `lachesis resume` goes on", "Cancelled"
    ),
    EndCause.SIGNAL: EndRule(
        "stopped",
        "ended by a signal, as `lachesis doctor --fix` or the system sends it",
        "Cancelled",
    ),
    EndCause.BUDGET: EndRule("stopped", "a budget is used up", "Cancelled", "raise_budget"),
    EndCause.STALLED: EndRule("stopped", "it stood still", "Cancelled"),
    EndCause.BROKEN_LEARNING: EndRule("stopped", "its learning was broken", "Cancelled"),
    EndCause.NO_MORE_ITEMS: EndRule(
        "stopped", "its environments ended before its last step", "Cancelled"
    ),
    EndCause.SERVER: EndRule("stopped", "the training server does not go on", "Cancelled"),
    EndCause.SKIPPED: EndRule(
        "stopped", "the run before it of the same schedule still ran", "Skipped", ""
    ),
    EndCause.INVALID_GROUPS: EndRule("failed", "all groups were invalid", "Failed", "check"),
    EndCause.NOT_VALIDATED: EndRule(
        "failed", "no recent test has shown that its environment works", "Refused"
    ),
    EndCause.FAILED: EndRule("failed", "it failed", "Failed", is_crash=True),
    EndCause.SERVE_LOST: EndRule(
        "failed",
        "the runner of this run was killed; start another one with `lachesis serve`, then "
        "`lachesis resume` the run",
        "Crashed",
        is_crash=True,
    ),
    EndCause.FLOW_LOST: EndRule(
        "failed", "its flow is gone, and has not recorded why", "Crashed", is_crash=True
    ),
    EndCause.HOST_LOST: EndRule(
        "failed", "its host was switched off or restarted", "Crashed", is_crash=True
    ),
    EndCause.NEVER_SUBMITTED: EndRule(
        "failed", "it was never submitted: no Prefect server has accepted it", ""
    ),
}
