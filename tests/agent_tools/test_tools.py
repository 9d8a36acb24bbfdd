"""Each tool by the contract's table, without a server: keys, errors, and what lasts."""

import json
import re
import time

import pytest

from lachesis.base.timestamps import now_iso
from lachesis.runs.metrics import MetricsFile
from lachesis.runs.store import RunStore
from tests.harness.locked_values import LOCKED_VALUES


def test_rl_list_environments(ask):
    answer = ask("rl_list_environments")
    assert set(answer) == {"environments", "count", "tips"}
    assert answer["count"] == len(answer["environments"]) >= 1
    arithmetic = next(
        environment for environment in answer["environments"] if environment["name"] == "arithmetic"
    )
    assert set(arithmetic) == {"name", "class_name", "file_path", "description"}


def test_rl_list_models(ask):
    answer = ask("rl_list_models")
    assert answer["profile"] == "embedded"
    (tiny,) = answer["models"]
    assert tiny["name"] == answer["default_model"]
    assert tiny["price"] is None
    recommended = tiny["recommended"]
    assert recommended["learning_rate"] == 1.5e-3
    assert "known to train tiny models" in recommended["learning_rate_source"]
    refused = ask("rl_list_models", profile="tinker")
    assert (refused["code"], refused["missing"]) == ("missing_key", ["TINKER_API_KEY"])


def test_rl_select_environment(ask):
    answer = ask("rl_select_environment", name="arithmetic")
    assert {"message", "environment", "file_path", "config"} <= set(answer)
    assert answer["config"]["group_size"] == 16
    unknown = ask("rl_select_environment", name="../../etc/passwd")
    assert unknown["code"] == "unknown_environment"
    assert "arithmetic" in unknown["available"]
    assert ask("rl_get_current_config")["environment"] == "arithmetic", (
        "a failed selection changes nothing"
    )


def test_rl_get_current_config(ask):
    assert ask("rl_get_current_config")["code"] == "run_state"
    ask("rl_select_environment", name="arithmetic")
    answer = ask("rl_get_current_config")
    free = {field["name"]: field for field in answer["configurable_fields"]}
    locked = {field["name"]: field for field in answer["locked_fields"]}
    keys = {"name", "type", "default", "description", "current_value"}
    assert keys <= set(free["group_size"])
    assert {*keys, "locked_value", "reason"} <= set(locked["tokenizer_name"])
    assert free["largest"]["current_value"] == 9, "the environment's own fields are there"
    assert locked["rollout_server_url"]["locked_value"] == "http://localhost:8000"
    assert "infrastructure" in locked["rollout_server_url"]["reason"]
    assert locked["slurm"]["locked_value"] is False
    assert ask("rl_edit_config", field="testing", value=True)["locked_value"] is False


def test_rl_edit_config(ask):
    ask("rl_select_environment", name="arithmetic")
    answer = ask("rl_edit_config", field="group_size", value=32)
    assert answer["field"] == "group_size"
    assert answer["value"] == answer["config"]["group_size"] == 32
    unknown = ask("rl_edit_config", field="nothing", value=1)
    assert unknown["code"] == "unknown_field"
    assert "group_size" in unknown["available_fields"]
    locked = ask("rl_edit_config", field="max_num_workers", value=1)
    assert locked["code"] == "locked_field"
    assert locked["locked_value"] == 64
    assert ask("rl_get_current_config")["configurable_fields"][0]["current_value"] == 32


def test_the_locked_values_of_the_cloud_are_those_of_the_contract(ask):
    """Only the dialect differs: vllm, which fails loudly where sglang gives an empty completion."""
    ask("rl_select_environment", name="arithmetic", profile="tinker")
    locked = {
        (locked_field["section"], locked_field["name"]): locked_field["locked_value"]
        for locked_field in ask("rl_get_current_config")["locked_fields"]
    }
    contract = {**LOCKED_VALUES, "run": {"slurm": False, "testing": False}}
    for section, fields in contract.items():
        for name, value in fields.items():
            assert locked[section, name] == value, (section, name)


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("group_size", "many", "integer, at least 2"),
        ("group_size", 1, "at least 2"),
        ("learning_rate", 2, "below 1"),
        ("learning_rate", float("nan"), "finite"),
        ("largest", 1000, "at most 999"),
        ("largest", None, "integer"),
        ("loss_fn", "mine", "importance_sampling"),
        ("wandb_project", "", "length at least 1"),
        ("wandb_project", "a\x1bb", "control characters"),
        ("use_wandb", "maybe", "boolean"),
    ],
)
def test_a_wrong_value_is_refused_and_nothing_changes(ask, desk, field, value, allowed):
    ask("rl_select_environment", name="arithmetic")
    before = desk.session_file.read()
    answer = ask("rl_edit_config", field=field, value=value)
    assert answer["code"] == "field_value"
    assert allowed in answer["error"]
    assert desk.session_file.read() == before


def test_a_name_that_is_taken_away_is_made_again(ask):
    """The Atropos API takes no environment without a name."""
    ask("rl_select_environment", name="arithmetic")
    ask("rl_edit_config", field="wandb_name", value=None)
    assert "wandb_name: arithmetic-20" in ask("rl_start_training", dry_run=True)["config_yaml"]


def test_values_that_do_not_fit_together_are_told_and_can_be_mended(ask):
    """Two fields that depend on each other are edited one after the other."""
    ask("rl_select_environment", name="arithmetic")
    assert "multiple" in ask("rl_edit_config", field="group_size", value=12)["problem"]
    assert "multiple" in ask("rl_get_current_config")["problem"]
    assert ask("rl_start_training", dry_run=True)["code"] == "field_value"
    assert "problem" not in ask("rl_edit_config", field="batch_size", value=132)
    assert ask("rl_start_training", dry_run=True)["config"]["batch_size"] == 132


def test_rl_start_training(ask):
    """Without a server: what a start would do, and what it refuses. A real start is in
    tests/e2e.
    """
    assert ask("rl_start_training")["code"] == "run_state", "nothing is selected"
    ask("rl_select_environment", name="arithmetic")
    plan = ask("rl_start_training", dry_run=True)
    assert plan["dry_run"] is True
    assert [service["name"] for service in plan["services"]] == [
        "engine",
        "api",
        "trainer",
        "environment",
    ]
    ports = {service["port"] for service in plan["services"]} - {None}
    assert len(ports) == 3
    assert all(
        f":{service['port']}" in plan["config_yaml"]
        for service in plan["services"]
        if service["name"] in ("api", "trainer")
    )
    shown = json.dumps([plan["services"], plan["config_yaml"].replace("api_key: x", "")])
    assert not re.search(r"tml-|_TOKEN\b|api_key", shown)
    down = ask("rl_start_training")
    assert down["code"] == "server_down"
    assert "lachesis serve" in down["error"]
    assert ask("rl_list_runs")["count"] == 0, "no run is left behind"
    ask("rl_select_environment", name="arithmetic", profile="tinker")
    missing = ask("rl_start_training")
    assert missing["code"] == "missing_key"
    assert missing["missing"] == ["TINKER_API_KEY"]


def test_rl_check_status(ask, desk, make_run):
    run = make_run()
    metrics = MetricsFile(RunStore(desk.store.home).dir(run.run_id).metrics)
    metrics.append(1, {"reward/mean": 0.25})
    unknown = ask("rl_check_status", run_id="ffffffff")
    assert unknown["code"] == "unknown_run"
    assert unknown["active_runs"] == [run.run_id]
    first = ask("rl_check_status", run_id=run.run_id)
    assert {
        "run_id",
        "status",
        "environment",
        "running_time_minutes",
        "processes",
        "wandb_project",
        "wandb_run_name",
    } <= set(first)
    assert set(first["logs"]) == {"api", "trainer", "env", "engine"}
    assert set(first["metrics"]) == {
        "step",
        "reward_mean",
        "percent_correct",
        "eval_percent_correct",
        "loss",
        "state",
    }
    assert first["metrics"]["reward_mean"] == 0.25
    assert {"phase", "progress", "health", "next_steps"} <= set(first)
    assert "rate_limited" not in first
    limited = ask("rl_check_status", run_id=run.run_id)
    assert limited["rate_limited"] is True
    assert 1700 < limited["next_check_in_seconds"] <= 1800
    assert limited["message"]
    assert limited["metrics"]["reward_mean"] == 0.25, "the last report is still there"
    desk.store.update(
        run.run_id, status="failed", error="trainer exited with code 1", failed_service="trainer"
    )
    desk.store.dir(run.run_id).get_log_file("trainer").write_text("Traceback\nboom\n")
    ended = ask("rl_check_status", run_id=run.run_id)
    assert "rate_limited" not in ended
    assert ended["status"] == "failed"
    assert ended["error"] == "trainer exited with code 1"
    assert ended["last_error"]["service"] == "trainer"
    assert ended["last_error"]["log_tail"].endswith("boom")


@pytest.mark.parametrize(
    "change",
    [
        {"word": "broken"},
        {"stalled": {"part": "sampler", "since": "2026-11-25T04:00:00+00:00", "evidence": "e"}},
    ],
)
def test_a_stall_and_another_word_are_reported_at_once(desk, ask, make_run, change):
    """Nobody may read for half an hour that a run continues which stands still."""
    health = {"word": "healthy", "evidence": [], "advice": [], "at": now_iso(), "stalled": None}
    run_id = make_run(health=health).run_id
    assert "rate_limited" not in ask("rl_check_status", run_id=run_id)
    limited = ask("rl_check_status", run_id=run_id)
    assert "continues by itself" in limited["message"]
    desk.store.update(run_id, health={**health, **change})
    changed = ask("rl_check_status", run_id=run_id)
    assert "rate_limited" not in changed
    assert changed["health"] | change == changed["health"]
    limited = ask("rl_check_status", run_id=run_id)
    assert limited["rate_limited"] is True
    if change.get("stalled"):
        assert "continues by itself" not in limited["message"]
        assert "has stalled in sampler" in limited["message"]
        (entry,) = ask("rl_list_runs")["runs"]
        assert entry["stalled"] == "stalled in sampler since 2026-11-25T04:00:00+00:00: e"


def test_the_limit_of_status_reports_is_a_setting(ask, make_run, monkeypatch):
    run_id = make_run().run_id
    monkeypatch.setenv("LACHESIS_STATUS_INTERVAL_S", "0")
    assert "rate_limited" not in ask("rl_check_status", run_id=run_id)
    assert "rate_limited" not in ask("rl_check_status", run_id=run_id)


def test_the_time_that_is_left_comes_from_the_last_steps(ask, desk, make_run):
    run = make_run()
    begun = time.time() + 1
    lines = [{"step": step, "time": begun + 2 * step, "reward/mean": 0.5} for step in range(1, 5)]
    # before a resume: no part of the pace
    lines.insert(0, {"step": 0, "time": begun - 3600, "reward/mean": 0.5})
    desk.store.dir(run.run_id).metrics.write_text(
        "".join(json.dumps(line) + "\n" for line in lines)
    )
    assert ask("rl_check_status", run_id=run.run_id)["progress"] == {
        "step": 4,
        "total": 10,
        "eta_seconds": 12.0,
    }


def test_rl_stop_training(ask, make_run):
    unknown = ask("rl_stop_training", run_id="ffffffff")
    assert unknown["code"] == "unknown_run"
    assert unknown["active_runs"] == []
    ended = ask("rl_stop_training", run_id=make_run(status="completed").run_id)
    assert "is not running" in ended["message"]
    stopped = ask("rl_stop_training", run_id=make_run(status="pending").run_id)
    assert set(stopped) == {"message", "run_id", "status"}
    assert stopped["status"] == "stopped"


def test_rl_get_results(ask, desk, make_run):
    assert ask("rl_get_results", run_id="ffffffff")["code"] == "unknown_run"
    run = make_run(status="completed")
    metrics = MetricsFile(desk.store.dir(run.run_id).metrics)
    for step in range(1, 31):
        metrics.append(step, {"reward/mean": step / 30})
    answer = ask("rl_get_results", run_id=run.run_id)
    assert {
        "run_id",
        "status",
        "environment",
        "wandb_project",
        "wandb_run_name",
        "final_metrics",
        "history",
    } <= set(answer)
    assert len(answer["history"]) == 10
    assert answer["final_metrics"]["step"] == 30
    assert answer["weights"] == {}, "this run has saved none"


def test_rl_list_runs(ask, make_run):
    assert ask("rl_list_runs") == {"runs": [], "count": 0}
    ids = [make_run(status="completed").run_id for _ in range(3)]
    answer = ask("rl_list_runs")
    assert answer["count"] == 3
    assert {run["run_id"] for run in answer["runs"]} == set(ids)
    assert {"run_id", "environment", "status", "wandb_run_name"} <= set(answer["runs"][0])
    assert answer["runs"][0]["learning"] == "unknown"
    assert answer["runs"][0]["evidence"] == "it completed after 0 of at least 5 steps"
    assert len(ask("rl_list_runs", limit=2)["runs"]) == 2


def test_rl_test_inference(ask):
    """What it refuses. Real tests are in tests/e2e."""
    assert ask("rl_test_inference")["code"] == "run_state"
    ask("rl_select_environment", name="arithmetic")
    missing = ask("rl_test_inference", models=["qwen/qwen3-8b"])
    assert missing["code"] == "missing_key"
    assert missing["missing"] == ["OPENROUTER_API_KEY"]
    assert ask("rl_test_inference")["code"] == "server_down"
    assert ask("rl_test_inference", models=["embedded:/nowhere"])["code"] == "model_not_found"
    assert ask("rl_test_inference", test_id="../../x")["code"] == "unknown_run"
    assert ask("rl_test_inference", num_steps=0)["code"] == "arguments"


def test_rl_health_check(ask):
    answer = ask("rl_health_check")
    assert answer["status"] == "degraded"
    assert "lachesis serve" in answer["problems"][0]
    assert answer["environments_discovered"] >= 1
    assert answer["missing_keys"] == []
