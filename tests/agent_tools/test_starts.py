"""Starting a run: once, in its turn, and what is refused. Real starts are in tests/e2e."""

import socket
import threading
from pathlib import Path

import pytest

from lachesis.agent_tools.draft import select_environment
from lachesis.agent_tools.launches import start_draft
from lachesis.agent_tools.session import AgentSession
from lachesis.prefect_client import api_requests, submit
from lachesis.runs.store import RunStore


def test_the_same_draft_is_started_once_for_each_key(ask, submitted):
    ask("rl_select_environment", name="arithmetic")
    first = ask("rl_start_training")
    assert {
        "run_id",
        "status",
        "environment",
        "config",
        "wandb_project",
        "wandb_run_name",
        "config_path",
        "logs",
        "message",
    } <= set(first)
    assert first["status"] == "starting"
    assert first["wandb_run_name"] == f"arithmetic-{first['run_id']}"
    other = ask("rl_start_training")["run_id"]
    keyed = ask("rl_start_training", idempotency_key="k")["run_id"]
    assert ask("rl_start_training", idempotency_key="k")["run_id"] == keyed
    ask("rl_edit_config", field="seed", value=1)
    assert "another configuration" in ask("rl_start_training", idempotency_key="k")["error"]
    changed = ask("rl_start_training")["run_id"]
    assert submitted == [first["run_id"], other, keyed, changed]
    assert len(set(submitted)) == 4


def test_two_starts_at_once_are_one_run(home, submitted):
    select_environment(AgentSession("one"), "arithmetic")
    threads = [
        threading.Thread(target=start_draft, args=(AgentSession("one"),), kwargs={"key": "k"})
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(submitted) == 1


def test_an_agent_that_was_killed_while_starting_gets_its_run_and_no_second_one(
    desk, submitted, monkeypatch
):
    """The run's folder is there, the server knows nothing, and nobody was told the id."""
    select_environment(desk, "arithmetic")
    with monkeypatch.context() as patched:
        patched.setattr(RunStore, "discard", lambda store, run_id: None)  # a kill cleans up nothing
        patched.setattr(
            submit, "submit_run", lambda store, record: (_ for _ in ()).throw(KeyboardInterrupt)
        )
        with pytest.raises(KeyboardInterrupt):
            start_draft(desk, key="k")
    (left,) = desk.store.all()
    assert left.flow_run_id is None
    assert start_draft(AgentSession("test"), key="k")["run_id"] == left.run_id
    assert submitted == [left.run_id]


def test_a_run_is_resumed_by_the_same_tool(ask, desk, make_run, submitted):
    run_id = make_run().run_id
    ask("rl_check_status", run_id=run_id)
    desk.store.update(run_id, status="failed", error="boom")
    shown = ask("rl_start_training", resume=run_id, dry_run=True)
    assert shown["dry_run"] is True
    assert submitted == [], "a dry run starts nothing"
    assert ask("rl_start_training", resume=run_id, idempotency_key="k")["code"] == "arguments"
    assert ask("rl_start_training", resume=run_id)["run_id"] == run_id
    assert submitted == [run_id]
    report = ask("rl_check_status", run_id=run_id)
    assert "rate_limited" not in report, (
        "what was said of the run before it ended is no report of it now"
    )
    assert report["processes"] == {"api": "pending", "trainer": "pending", "env": "pending"}
    assert (
        ask("rl_start_training", resume=make_run(status="completed").run_id)["code"] == "run_state"
    )


class QueueOfTwo:
    """Answer as a server with two runs that go on and two that wait."""

    def read_flow_run(self, flow_run_id):
        return {"id": flow_run_id, "next_scheduled_start_time": "2026-01-01T00:00:00Z"}

    def count_flow_runs(self, _, states, due_before=None):
        return 2


def test_a_run_without_a_free_place_has_its_place_in_the_queue(
    ask, make_run, submitted, monkeypatch
):
    monkeypatch.setenv("LACHESIS_MAX_RUNS", "2")
    api = QueueOfTwo()
    monkeypatch.setattr(submit, "find_deployment", lambda *_: (api, {"id": "d"}))
    ask("rl_select_environment", name="arithmetic")
    started = ask("rl_start_training")
    assert started["queue"] == {"place": 2, "running": 2, "limit": 2}
    assert "number 2 in this host's queue" in started["message"]
    monkeypatch.setenv("LACHESIS_MAX_RUNS", "many")
    assert "LACHESIS_MAX_RUNS" in ask("rl_health_check")["error"]


def test_a_start_whose_environment_file_is_gone_is_refused(ask, home, monkeypatch):
    source = Path(ask("rl_list_environments")["environments"][0]["file_path"]).read_text()
    folder = home / "envs"
    folder.mkdir()
    (folder / "mine.py").write_text(source.replace('name = "arithmetic"', 'name = "mine"'))
    monkeypatch.setenv("LACHESIS_ENVIRONMENTS", str(folder))
    ask("rl_select_environment", name="mine")
    (folder / "mine.py").unlink()
    assert ask("rl_start_training")["code"] == "unknown_environment"


def test_a_server_that_hangs_is_told_as_one_that_is_down(ask, monkeypatch):
    monkeypatch.setattr(api_requests, "TIMEOUT_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("PREFECT_API_URL", f"http://127.0.0.1:{silent.getsockname()[1]}/api")
        ask("rl_select_environment", name="arithmetic")
        answer = ask("rl_start_training")
        assert answer["code"] == "server_down"
        assert "busy" in answer["error"]
        assert ask("rl_health_check")["status"] == "degraded"
