"""A home that has been served for weeks starts again without a word in the server's log."""

import shutil
import sqlite3
import time
from contextlib import closing
from datetime import UTC, datetime, timedelta
from uuid import uuid4

import httpx
import pytest

from lachesis.prefect_client.serve_info import find_api_url
from tests.faults.struck_home import StruckHome

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800), pytest.mark.matrix]
NUM_STARTS, NUM_TICKS, EVENTS_PER_TICK, LINES_PER_TICK = 10, 2000, 10, 5
RESOURCES_PER_EVENT = 2
# Older than all that the server and the monitor keep, so that the next start removes it.
AGE = timedelta(days=20)
# After this time each service of the server has looked once, and a tick has ended.
SETTLE_S = 20.0
TIMES = (
    "created", "updated", "start_time", "end_time", "expected_start_time", "state_timestamp",
    "timestamp", "occurred", "received", "recorded",
)  # fmt: skip


@pytest.fixture
def old_home(new_home, monkeypatch):
    """A home of its own, whose server has recorded many ticks of the monitor; it is not served."""
    served = StruckHome(new_home())
    monkeypatch.setenv("LACHESIS_HOME", str(served.home))
    try:
        served.serve(LACHESIS_MONITOR_INTERVAL_S="15")
        record_one_tick()
        served.stop_serving()
        repeat_rows(served.home / "prefect" / "prefect.db")
        yield served
    finally:
        served.stop_serving()


def record_one_tick():
    with httpx.Client(base_url=find_api_url(), timeout=60, trust_env=False) as client:

        def post(path, body):
            while (response := client.post(path, json=body)).status_code == 503:
                time.sleep(0.2)  # The database is busy.
            return response.raise_for_status().json() if response.content else None

        deployment = client.get("/deployments/name/monitor/monitor").json()
        now = datetime.now(UTC).isoformat()
        tick = {
            "flow_id": deployment["flow_id"],
            "deployment_id": deployment["id"],
            "state": {"type": "COMPLETED", "name": "Completed"},
        }
        run_id = post("/flow_runs/", tick)["id"]
        line = {"name": "n", "level": 20, "message": "m", "timestamp": now, "flow_run_id": run_id}
        post("/logs/", [line])
        resource = {"prefect.resource.id": f"prefect.flow-run.{run_id}"}
        event = {"id": str(uuid4()), "occurred": now, "event": "tick", "resource": resource}
        post("/events", [event])
        time.sleep(5)  # Events are stored by a task of the server.


def repeat_rows(database):
    """Repeat the tick with its state, its lines and its events, all of them long ago; those that
    are scheduled are overdue, as after a night with the lid closed.
    """
    with closing(sqlite3.connect(database)) as connection:
        connection.row_factory = sqlite3.Row

        def insert(table, row):
            marks = ", ".join("?" * len(row))
            columns = ", ".join(f'"{name}"' for name in row)
            connection.execute(f"INSERT INTO {table} ({columns}) VALUES ({marks})", [*row.values()])

        def find(table, condition, *values):
            query = f"SELECT * FROM {table} WHERE {condition}"
            row = dict(connection.execute(query, values).fetchone())
            at = (datetime.now(UTC) - AGE).strftime("%Y-%m-%d %H:%M:%S.%f")
            return {name: at if name in TIMES and row[name] else row[name] for name in row}

        run = find("flow_run", "state_type = 'COMPLETED'")
        state = find("flow_run_state", "id = ?", str(run["state_id"]))
        line = find("log", "flow_run_id = ?", str(run["id"]))
        event = find("events", "event = 'tick'")
        resource = find("event_resources", "event_id = ?", str(event["id"]))
        for number in range(NUM_TICKS):
            run_id, state_id = str(uuid4()), str(uuid4())
            new_run = {**run, "id": run_id, "name": f"tick-{number}", "idempotency_key": None}
            insert("flow_run", {**new_run, "state_id": None})
            insert("flow_run_state", {**state, "id": state_id, "flow_run_id": run_id})
            connection.execute("UPDATE flow_run SET state_id = ? WHERE id = ?", (state_id, run_id))
            for _ in range(LINES_PER_TICK):
                insert("log", {**line, "id": str(uuid4()), "flow_run_id": run_id})
            for _ in range(EVENTS_PER_TICK):
                event_id = str(uuid4())
                insert("events", {**event, "id": event_id})
                for _ in range(RESOURCES_PER_EVENT):
                    insert(
                        "event_resources", {**resource, "id": str(uuid4()), "event_id": event_id}
                    )
        for column in ("expected_start_time", "next_scheduled_start_time"):
            overdue = f"strftime('%Y-%m-%d %H:%M:%f', {column}, '-1 hour') || '000'"
            connection.execute(
                f"UPDATE flow_run SET {column} = {overdue} WHERE state_type = 'SCHEDULED'"
            )
        connection.commit()


def test_no_start_finds_the_database_locked(old_home, row):
    """The monitor's first tick, which removes old ones, is part of each start."""
    log, folder = old_home.home / "logs" / "server.log", old_home.home / "prefect"
    saved = shutil.copytree(folder, old_home.home / "saved")
    locked = []
    for _ in range(NUM_STARTS):
        shutil.rmtree(folder)
        shutil.copytree(saved, folder)
        old_home.serve(LACHESIS_MONITOR_INTERVAL_S="15")
        time.sleep(SETTLE_S)
        text = log.read_text(errors="replace")
        locked.append(text.count("sqlite3.OperationalError: database is locked"))
        old_home.stop_serving()
    assert locked == NUM_STARTS * [0]
    row(
        fault=f"{NUM_STARTS} starts with {NUM_TICKS} old ticks",
        phase="serving",
        expected="no database is locked",
        seen="none",
    )
