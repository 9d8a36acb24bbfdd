"""Run a part of a flow as a task whose state on the page is true.

Prefect marks a task as failed whenever it raises, and logs a traceback. A stop that a person has
asked for is no failure, and the reason of a failure is one sentence.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.states import Cancelled, Completed, Failed

from lachesis.base.secrets import redact
from lachesis.supervision.stop_requests import StopRequested


@dataclass
class TaskOutcome:
    """Hold the result or the error of a task's work."""

    result: Any = None
    error: BaseException | None = None


def run_as_task(name: str, work: Callable[[], Any]) -> Any:
    """Run `work` as a task of this name; return its result and raise its error."""
    outcome = TaskOutcome()
    _run(name, work, outcome, return_state=True)
    if outcome.error is not None:
        raise outcome.error
    return outcome.result


@task(task_run_name="{name}", cache_policy=NO_CACHE)
def _run(name: str, work: Callable[[], Any], outcome: TaskOutcome) -> State[Any]:
    """Do the work, keep its outcome, and return the state that the task shall have."""
    try:
        outcome.result = work()
    # Also a signal to end, which is raised again outside of the task.
    except BaseException as error:
        outcome.error = error
        message = redact(str(error))
        if isinstance(error, StopRequested) or not isinstance(error, Exception):
            return Cancelled(message=message)
        return Failed(message=message)
    return Completed()
