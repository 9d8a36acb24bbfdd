"""The private parts of Prefect that the runner uses exist in the version that is installed."""

from __future__ import annotations

import importlib.metadata
import inspect

from prefect._internal.observers import FlowRunCancellingObserver
from prefect.runner import Runner
from prefect.runner._cancellation_manager import CancellationManager
from prefect.runner._scheduled_run_poller import ScheduledRunPoller

from lachesis.orchestration import prefect_internals


def test_it_is_the_version_that_the_module_was_written_for() -> None:
    assert importlib.metadata.version("prefect") == prefect_internals.PREFECT_VERSION


def test_every_private_part_exists() -> None:
    runner = Runner(name="internals")
    assert prefect_internals.list_running_ids(runner) == []
    runner_source = inspect.getsource(Runner)
    for name in ("_scheduled_run_poller", "_cancelling_observer", "_cancellation_manager"):
        assert f"self.{name} = " in runner_source, name
    assert "self.stopping" in inspect.getsource(ScheduledRunPoller)
    assert inspect.iscoroutinefunction(CancellationManager.cancel_by_id)
    observer_source = inspect.getsource(FlowRunCancellingObserver)
    for name in ("self._polling_task", "self._consumer_task", "def _start_polling_task"):
        assert name in observer_source, name
