"""How a run's flow reads what ends it."""

from __future__ import annotations

import signal

from prefect.exceptions import TerminationSignal

from flows.launch import told_to_end


def caught(*errors: BaseException) -> BaseException:
    """The last of errors, each raised while the one before was handled."""
    before: BaseException | None = None
    for error in errors:
        error.__context__ = before
        before = error
    assert before is not None
    return before


def test_a_signal_is_seen_behind_the_error_that_came_of_it() -> None:
    asked = TerminationSignal(signal.SIGTERM)
    assert told_to_end(asked) is asked
    assert told_to_end(caught(asked, ValueError("Task run is not set"), RuntimeError("left the task"))) is asked
    assert told_to_end(caught(ValueError("of the run"), RuntimeError("left the task"))) is None
