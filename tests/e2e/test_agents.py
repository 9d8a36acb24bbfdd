"""Agents do the whole job with tools, each call from a process that is killed after it."""

import functools
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from lachesis.base.json_text import Json
from tests.e2e import learning
from tests.e2e.learning import check_what_was_learned

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(1200)]

SETTINGS: dict[str, Json] = {
    "mcp-http": learning.SETTINGS,
    "hermes": {"total_steps": 40, "final_evaluation": False, "use_wandb": False},
    "http": {"total_steps": 41, "final_evaluation": False, "use_wandb": False},
}


@pytest.fixture(scope="module")
def surfaces(served):
    """`lachesis mcp --http` and `lachesis api`, and what an agent must know of each transport."""
    with served.serve_surfaces() as places:
        yield {"stdio": {}, "hermes": {}, **places}


@pytest.fixture
def call(agent, surfaces):
    """One tool call over a transport, by a process that is gone afterwards."""
    return lambda transport, tool, /, **arguments: agent(
        transport, tool, surfaces[transport], **arguments
    )


def test_three_agents_go_from_the_list_to_weights_at_once(
    call, cli, wait_ended, start_engine, tmp_path
):
    """Over MCP by HTTP, as a Hermes plugin, and over the HTTP service, each with its own draft; a
    fourth run waits its turn. The first one trains until its model has learned.
    """
    transports = ("mcp-http", "hermes", "http")
    # All start their runs at once, so that none has completed before the last one has started.
    are_ready = threading.Barrier(len(transports), timeout=300)

    def start(transport):
        return _start(call, transport, are_ready)

    with ThreadPoolExecutor(len(transports)) as agents:
        started = dict(zip(transports, agents.map(start, transports), strict=True))
        runs = {transport: answer["run_id"] for transport, answer in started.items()}
        assert [answer["config"]["total_steps"] for answer in started.values()] == [60, 40, 41], (
            "three drafts"
        )
        assert len(set(runs.values())) == 3
        again = call("http", "rl_start_training", idempotency_key="http")
        assert again["run_id"] == runs["http"], "a repeated call starts nothing"
        fourth = call("http", "rl_start_training", idempotency_key="one more")
        assert fourth["queue"] == {"place": 1, "running": fourth["queue"]["running"], "limit": 3}
        assert call("http", "rl_check_status", run_id=fourth["run_id"])["queue"]["place"] == 1
        assert call("http", "rl_stop_training", run_id=fourth["run_id"])["status"] == "stopped"
        for run_id in runs.values():
            wait_ended(run_id)
        list(agents.map(lambda one: _fetch(call, one, runs[one]), transports))
    check_what_was_learned(
        runs["mcp-http"],
        functools.partial(call, "mcp-http"),
        cli,
        start_engine,
        tmp_path / "adapter",
    )
    assert "is not running" in call("http", "rl_stop_training", run_id=runs["http"])["message"]
    assert set(runs.values()) < {run["run_id"] for run in call("hermes", "rl_list_runs")["runs"]}


def _start(call, transport, are_ready):
    assert "arithmetic" in [
        environment["name"]
        for environment in call(transport, "rl_list_environments")["environments"]
    ]
    call(transport, "rl_select_environment", name="arithmetic")
    for field, value in SETTINGS[transport].items():
        call(transport, "rl_edit_config", field=field, value=value)
    are_ready.wait()
    answer: Json = call(transport, "rl_start_training", idempotency_key=transport)
    assert answer["status"] == "starting"
    return answer


def _fetch(call, transport, run_id):
    status = call(transport, "rl_check_status", run_id=run_id)
    assert status["status"] == "completed", status
    results = call(transport, "rl_get_results", run_id=run_id)
    assert results["final_metrics"]["step"] == SETTINGS[transport]["total_steps"]
    assert results["weights"]["sampler_weights"].startswith("tinker://")
    assert results["weights"]["state"].startswith("tinker://")
    assert (Path(results["weights"]["adapter"]) / "adapter_model.safetensors").is_file()


def test_an_environment_is_tried_at_an_endpoint(call, endpoint, served_home):
    """A test goes on when the call is over, and its id asks again. The night's test has the
    embedded model.
    """
    call("stdio", "rl_select_environment", name="arithmetic")
    wanted = {"num_steps": 2, "group_size": 4, "models": ["never", "some/model"]}
    answer = call("stdio", "rl_test_inference", **wanted)
    told = answer["progress_notifications"]
    assert told == sorted(set(told)), "progress only grows"
    assert told
    while answer["status"] not in ("completed", "failed"):
        answer = call("stdio", "rl_test_inference", test_id=answer["test_id"])
    assert answer["status"] == "completed", answer
    assert answer["test_config"] == {
        "num_steps": 2,
        "group_size": 4,
        "rollouts_per_model": 8,
        "total_rollouts": 16,
    }
    wrong, right = answer["models_tested"]
    assert wrong["total_completions"] == right["total_completions"] == 8, answer
    assert (wrong["accuracy"], right["accuracy"]) == (0.0, 1.0), "as their names say"
    assert Path(right["output_file"]).name == "test_arithmetic_some_model.jsonl"
    assert Path(right["log_file"]).is_file()
    assert {
        "model",
        "name",
        "scale",
        "wandb_run",
        "steps",
        "steps_tested",
        "correct_completions",
    } <= set(wrong)
    assert {"steps_with_correct", "step_success_rate"} <= set(wrong)
    assert [set(step) for step in wrong["steps"]] == [
        {"step", "completions", "correct", "scores"}
    ] * 2
    summary = answer["summary"]
    assert summary["best_model"] == "some/model"
    assert summary["environment_working"] is True
    assert {
        "steps_requested",
        "models_tested",
        "models_succeeded",
        "avg_accuracy",
        "output_directory",
    } <= set(summary)
    assert wrong["verdict"]["word"] == "too hard"
    assert right["verdict"]["word"] == summary["verdict"] == "too easy"
    assert summary["forecast"]["tokens"]["low"] > 0
    stages = [(stage["name"].split()[0], stage["status"]) for stage in answer["stages"]]
    assert stages[:4] == [
        (name, "passed") for name in ("import", "config", "dataset", "model-free")
    ]
    assert sorted(stages[4:]) == [
        (name, "passed") for name in ("inference", "inference", "scoring", "scoring")
    ]
    assert endpoint.keys == {f"Bearer {endpoint.key}"}
    holding = [
        file
        for file in served_home.rglob("*")
        if file.is_file() and endpoint.key.encode() in file.read_bytes()
    ]
    assert not holding, (
        "the key is in no file, nor in the server's database, which has all logs and artifacts"
    )
    commands = [file.read_bytes() for file in Path("/proc").glob("[0-9]*/cmdline") if file.exists()]
    assert not [command for command in commands if endpoint.key.encode() in command]


def test_prompts_of_ones_own_are_answered_and_scored(call, endpoint):
    """What the environment's verifier can score has a score, anything else says why not."""
    arguments = {
        "prompts": ["3+4=", "who are you?"],
        "models": ["some/model"],
        "group_size": 2,
        "max_tokens": 5,
    }
    answer = call("http", "rl_test_inference", **arguments, temperature=0.5)
    while answer["status"] not in ("completed", "failed"):
        answer = call("http", "rl_test_inference", test_id=answer["test_id"])
    known, other = answer["models_tested"][0]["prompts"]
    assert known == {"prompt": "3+4=", "responses": [{"text": "7", "score": 1.0}] * 2}
    assert [response["score"] for response in other["responses"]] == [None, None]
    assert "no item" in other["note"]
    assert endpoint.last["max_tokens"] == 5
    assert endpoint.last["temperature"] == 0.5


def test_foreign_callers_are_refused(surfaces):
    """The HTTP surfaces refuse a missing token, a foreign Host and a foreign Origin."""
    mcp, api = surfaces["mcp-http"]["URL"] + "/mcp", surfaces["http"]["URL"] + "/health"
    token = {"Authorization": f"Bearer {surfaces['mcp-http']['TOKEN']}"}
    assert httpx.post(mcp, json={}, trust_env=False).status_code == 401
    assert (
        httpx.post(mcp, json={}, headers={"Authorization": "Bearer x"}, trust_env=False).status_code
        == 401
    )
    assert httpx.get(api, trust_env=False).status_code == 401
    for url, headers in ((mcp, token), (api, token)):
        for foreign in (
            {"Host": "evil.example"},
            {"Origin": "http://evil.example"},
            {"Origin": "http://localhost:1"},
        ):
            assert (
                httpx.get(url, headers={**headers, **foreign}, trust_env=False).status_code == 403
            )
