"""Files that somebody has damaged: each is named, skipped or made again, and never a fault."""

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from lachesis.agent_tools.draft import select_environment
from lachesis.agent_tools.session import AgentSession
from lachesis.agent_tools.tools import TOOLS, CallContext, to_compact_json
from lachesis.config.launch_spec import TestSpec
from lachesis.inference_tests.store import InferenceRequest, InferenceTestStore

DEEP = "[" * 100_000
RUN_TOOLS = ("rl_check_status", "rl_get_results", "rl_list_runs")


@pytest.mark.parametrize(
    "line",
    [
        "{}",
        "[]",
        "5",
        "null",
        '{"step": "a"}',
        '{"step": 3, "reward/mean": NaN}',
        '{"step": 3, "time": "x"}',
        DEEP,
        "\x00\xff",
    ],
)
def test_a_line_of_metrics(ask, desk, make_run, line):
    run_id = make_run(status="completed").run_id
    good = (
        '{"step": 1, "time": 1.0, "reward/mean": 0.5}\n'
        '{"step": 2, "time": 2.0, "reward/mean": 0.75}\n'
    )
    desk.store.dir(run_id).metrics.write_text(good + line + "\n")
    for tool in RUN_TOOLS[:2]:
        answer = ask(tool, run_id=run_id)
        assert "code" not in answer, answer
        json.loads(to_compact_json(answer), parse_constant=pytest.fail)  # NaN is not JSON
    assert ask("rl_get_results", run_id=run_id)["reward"]["first"] == 0.5


@pytest.mark.parametrize(
    "content",
    ["[]", "null", "5", DEEP, '{"api_url": 5, "keys": [], "max_runs": 4}', '{"max_runs": "x"}'],
)
def test_what_the_launcher_has_written(ask, home, content):
    (home / "server.json").write_text(content)
    assert ask("rl_health_check")["status"] == "degraded"
    ask("rl_select_environment", name="arithmetic")
    assert ask("rl_start_training")["code"] == "server_down"


def test_an_address_that_is_none(ask, monkeypatch):
    monkeypatch.setenv("PREFECT_API_URL", "http://[::1")
    ask("rl_select_environment", name="arithmetic")
    assert ask("rl_start_training")["code"] == "server_down"


@pytest.mark.parametrize("content", ["{", '{"properties": 1, "definitions": 2, "values": 3}', DEEP])
def test_a_kept_schema_is_learnt_again(home, content):
    kept = home / "cache" / "schemas"
    select_environment(AgentSession("test"), "arithmetic")
    names = [file.name for file in kept.glob("*.json")]
    assert names
    kept.unlink()  # other tests use those files too
    kept.mkdir()
    for name in names:
        (kept / name).write_text(content)
    assert select_environment(AgentSession("test"), "arithmetic")["config"]["largest"] == 9


@pytest.mark.parametrize(
    "change", [{"created_at": "x"}, {"started_at": "2026-01-01T00:00:00"}, {"status": "lost"}]
)
def test_a_run_whose_record_is_damaged_is_named(ask, desk, make_run, change):
    run_id, other = make_run().run_id, make_run(status="completed").run_id
    file = desk.store.dir(run_id).record
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    assert ask("rl_check_status", run_id=run_id)["code"] == "storage"
    listed = ask("rl_list_runs")
    assert [run["run_id"] for run in listed["runs"]] == [other]
    assert run_id in listed["warning"]


def test_an_error_without_words(ask, make_run):
    assert (
        ask("rl_check_status", run_id=make_run(status="failed", error="").run_id)["status"]
        == "failed"
    )


def test_a_draft_with_a_profile_that_there_is_no_more(ask, desk):
    ask("rl_select_environment", name="arithmetic")
    desk.session_file.file.write_text(
        desk.session_file.file.read_text().replace('"embedded"', '"nix"')
    )
    for tool, arguments in (
        ("rl_edit_config", {"field": "seed", "value": 1}),
        ("rl_test_inference", {}),
        ("rl_start_training", {}),
        ("rl_get_current_config", {}),
    ):
        assert ask(tool, **arguments)["code"] == "config", tool


@pytest.mark.parametrize("model", ["~nosuchuser/x", "/nowhere", "a\x00b"])
def test_a_model_that_is_no_place(ask, model):
    assert ask("rl_select_environment", name="arithmetic", model=model)["code"] in (
        "model_not_found",
        "arguments",
    )


def test_a_value_that_is_nested_beyond_reason(desk):
    value: Any = 1
    for _ in range(900):
        value = [value]
    select_environment(desk, "arithmetic")
    answer, _ = TOOLS["rl_edit_config"].run_safely(
        CallContext(desk), {"field": "wandb_name", "value": value}
    )
    assert answer["code"] == "arguments"


def test_a_run_that_was_never_submitted_ends_after_a_day(ask, make_run):
    """Its starter was killed between the folder and the server; `serve` sends it until then."""
    for days, status in ((0.9, "pending"), (1.1, "failed")):
        queued_at = (datetime.now(UTC) - timedelta(days=days)).isoformat()
        run_id = make_run(status="pending", queued_at=queued_at).run_id
        answer = ask("rl_check_status", run_id=run_id)
        assert answer["status"] == status
    assert "never submitted" in answer["error"]


@pytest.fixture
def make_test(home):
    def make(**changes):
        tests = InferenceTestStore(home)
        request = InferenceRequest(
            environment="arithmetic",
            environment_file="a.py",
            models=["embedded:tiny"],
            spec=TestSpec(environment="arithmetic"),
        )
        test = tests.create(request, "").model_copy(update=changes)
        tests.save(test)
        return test

    return make


def test_a_test_that_nobody_runs_any_more_has_failed(ask, make_test):
    dead = ask("rl_test_inference", test_id=make_test(status="running").test_id)
    assert dead["status"] == "failed"
    assert "flow is gone" in dead["error"]
    long_ago = (datetime.now(UTC) - timedelta(days=2)).isoformat()
    lost = ask("rl_test_inference", test_id=make_test(created_at=long_ago).test_id)
    assert "never submitted" in lost["error"]


@pytest.mark.parametrize("result", [{"summary": 5}, {"models_tested": 5}])
def test_the_result_of_a_test(ask, make_test, result):
    answer = ask("rl_test_inference", test_id=make_test(status="completed", result=result).test_id)
    assert answer["code"] == "storage"
    assert "test.json" in answer["error"]


def test_a_test_whose_folder_is_gone_is_made_again(ask, desk):
    ask("rl_select_environment", name="arithmetic")
    with desk.session_file.change() as state:
        from lachesis.agent_tools.session import RequestedTest

        spec = TestSpec(environment="arithmetic", by_agent=True)
        state.test = RequestedTest(request=spec, test_id="ffffffff")
    assert ask("rl_test_inference")["code"] == "server_down", "a new one is started"
