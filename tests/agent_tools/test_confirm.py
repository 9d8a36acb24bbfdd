"""A yes belongs to what was shown: a changed draft or a used yes gives a new preview."""

import json
import threading
import time

import pytest

from lachesis.agent_tools import inference_tests, launches
from lachesis.agent_tools.draft import select_environment
from lachesis.base.errors import LachesisError
from lachesis.prefect_client import background_serve


@pytest.fixture
def paid(ask, home, random_model, monkeypatch):
    """A draft on the paid profile that needs no test."""
    keys = {"TINKER_API_KEY": "set", "TINKER_BASE_URL": "set"}
    monkeypatch.setattr(background_serve, "read_key_names", lambda: keys)
    (home / "policy.yaml").write_text("agents: {require_validation: false, fields: [total_steps]}")
    ask("rl_select_environment", name="arithmetic", profile="tinker", model=random_model)
    ask("rl_edit_config", field="total_steps", value=3)


@pytest.mark.usefixtures("paid")
def test_an_edit_after_the_preview_needs_a_new_one(ask, submitted):
    shown = ask("rl_start_training")
    ask("rl_edit_config", field="total_steps", value=5000)
    for confirm in (True, shown["preview"]):
        again = ask("rl_start_training", confirm=confirm)
        assert again["confirmation_required"] is True
        assert again["preview"] != shown["preview"]
    assert submitted == []
    assert ask("rl_start_training", confirm=True)["run_id"], "true agrees to the last preview"
    assert len(submitted) == 1


@pytest.mark.usefixtures("paid")
def test_a_yes_counts_once(ask, submitted):
    shown = ask("rl_start_training")["preview"]
    assert ask("rl_start_training", confirm=shown)["run_id"]
    for confirm in (shown, "true", "made up"):
        assert ask("rl_start_training", confirm=confirm)["confirmation_required"] is True
    assert len(submitted) == 1


@pytest.mark.usefixtures("paid")
def test_true_without_a_preview_is_no_yes(ask, submitted):
    assert ask("rl_start_training", confirm=True)["confirmation_required"] is True
    assert submitted == []


@pytest.mark.usefixtures("paid")
@pytest.mark.parametrize("changed", [{"from_checkpoint": "0123abcd"}, {"require_validation": True}])
def test_other_arguments_are_not_what_was_shown(ask, submitted, changed):
    shown = ask("rl_start_training")["preview"]
    answer = ask("rl_start_training", confirm=shown, **changed)
    assert "run_id" not in answer
    assert submitted == []


@pytest.mark.usefixtures("paid")
def test_a_repeated_call_gets_its_run_without_a_second_yes(ask, submitted):
    shown = ask("rl_start_training", idempotency_key="k")["preview"]
    run_id = ask("rl_start_training", idempotency_key="k", confirm=shown)["run_id"]
    assert ask("rl_start_training", idempotency_key="k", confirm=shown)["run_id"] == run_id
    assert submitted == [run_id]


@pytest.mark.usefixtures("paid")
def test_a_resume_is_agreed_to_with_its_limits(ask, submitted, make_run):
    run_id = make_run(profile="tinker", status="failed").run_id
    shown = ask("rl_start_training", resume=run_id)["preview"]
    other = ask("rl_start_training", resume=run_id, limits={"max_hours": 9}, confirm=shown)
    assert other["confirmation_required"] is True
    assert other["preview"] != shown
    assert submitted == []


@pytest.mark.usefixtures("paid")
def test_a_limit_of_money_needs_no_yes(ask, home, random_model, submitted):
    price = {"prefill": 1, "sample": 1, "train": 1, "dated": "2026-10-07"}
    (home / "prices.yaml").write_text(json.dumps({"models": {random_model: price}}))
    ask("rl_edit_config", field="max_cost_usd", value=1.0)
    answer = ask("rl_start_training")
    assert answer.get("run_id"), answer
    assert len(submitted) == 1


def test_a_call_that_works_keeps_no_other_call_waiting(desk, ask, make_run, monkeypatch):
    """A stop, a status and an edit are answered while a start and a test are being checked."""
    select_environment(desk, "arithmetic")
    is_over = threading.Event()

    def work(*_, **__):
        is_over.wait(20)
        raise LachesisError("it is over")

    monkeypatch.setattr(launches, "start_run", work)
    monkeypatch.setattr(inference_tests, "start_test", work)
    monkeypatch.setattr("lachesis.agent_tools.tools.call_with_server", lambda call, _: call())
    workers = [
        threading.Thread(target=ask, args=(tool,), daemon=True)
        for tool in ("rl_start_training", "rl_test_inference")
    ]
    for worker in workers:
        worker.start()
    time.sleep(0.5)
    run_id = make_run(status="pending").run_id
    begun = time.monotonic()
    assert ask("rl_check_status", run_id=run_id)["status"] == "pending"
    assert ask("rl_edit_config", field="group_size", value=8)["value"] == 8
    assert ask("rl_stop_training", run_id=run_id)["status"] == "stopped"
    assert time.monotonic() - begun < 4, "none has waited for the lock of the session"
    is_over.set()
    for worker in workers:
        worker.join(20)
