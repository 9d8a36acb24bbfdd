"""The private parts of Prefect that the runner uses exist in the version that is installed."""

import importlib.metadata
import inspect
import sqlite3
from contextlib import closing
from types import SimpleNamespace

import httpx
import pytest
from prefect._internal.observers import FlowRunCancellingObserver
from prefect.runner import Runner
from prefect.runner._cancellation_manager import CancellationManager
from prefect.runner._scheduled_run_poller import ScheduledRunPoller
from prefect.server.database.configurations import SQLITE_BEGIN_MODE, AioSqliteConfiguration
from sqlalchemy import text

from lachesis.prefect_client import internals


def test_it_is_the_version_that_the_module_was_written_for():
    assert importlib.metadata.version("prefect") == internals.PREFECT_VERSION


def test_every_private_part_exists():
    runner = Runner(name="internals")
    assert internals.list_running_ids(runner) == []
    runner_source = inspect.getsource(Runner)
    for name in ("_scheduled_run_poller", "_cancelling_observer", "_cancellation_manager"):
        assert f"self.{name} = " in runner_source, name
    assert "self.stopping" in inspect.getsource(ScheduledRunPoller)
    assert inspect.iscoroutinefunction(CancellationManager.cancel_by_id)
    observer_source = inspect.getsource(FlowRunCancellingObserver)
    for name in ("self._polling_task", "self._consumer_task", "def _start_polling_task"):
        assert name in observer_source, name


async def test_a_server_that_is_away_at_the_end_of_a_cancellation_does_not_end_the_runner():
    """The exception would end every task of the runner, and with them its other runs."""

    async def refuse(*_):
        raise httpx.ConnectError("refused")

    manager = SimpleNamespace(
        cancel=refuse,
        _finalize_cancelled_state=refuse,
        _client=SimpleNamespace(read_flow_run=refuse),
    )
    internals.keep_final_states(SimpleNamespace(_cancellation_manager=manager))  # type: ignore[arg-type]
    flow_run = SimpleNamespace(id="0", name="a run", state=None)
    assert await manager._finalize_cancelled_state(flow_run) is False


async def test_a_transaction_of_the_server_takes_the_write_lock_when_it_begins(
    monkeypatch, tmp_path
):
    original = AioSqliteConfiguration.begin_transaction
    monkeypatch.setattr(AioSqliteConfiguration, "begin_transaction", original)
    internals.lock_sqlite_at_begin()
    database = AioSqliteConfiguration(f"sqlite+aiosqlite:///{tmp_path / 'a.db'}")
    session = await database.session(await database.engine())
    async with session, database.begin_transaction(session):
        assert SQLITE_BEGIN_MODE.get() == "IMMEDIATE"
        await session.execute(text("SELECT 1"))
        with (
            closing(sqlite3.connect(tmp_path / "a.db", timeout=0.1)) as other,
            pytest.raises(sqlite3.OperationalError, match="database is locked"),
        ):
            other.execute("BEGIN IMMEDIATE")
