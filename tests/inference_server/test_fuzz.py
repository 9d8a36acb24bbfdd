"""No request, however wrong, ends the inference server or is answered without its token."""

import json
import sys
from typing import Any, cast

import httpx
import pytest

from lachesis.config import run_config as run_config
from lachesis.inference_server.app import create_app
from lachesis.supervision.services.ports import reserve_free_ports
from lachesis.trainer.trainer_state import TrainerState
from tests.harness.fuzz import fuzz, refusals, routes
from tests.harness.processes import run_program

CONFIG = run_config.resolve_run_config("arithmetic", "embedded", {})
APP = create_app(cast(Any, None), None, CONFIG, TrainerState())
SCHEMA = APP.openapi()
SELF = ("/health", "/wandb_info")
TOKEN = {"Authorization": "Bearer run-token"}


@pytest.fixture(scope="module")
def server(engine, tmp_path_factory):
    """A process that serves the base model; its address."""
    folder = tmp_path_factory.mktemp("server")
    url = f"http://127.0.0.1:{reserve_free_ports(1)[0]}"
    edits = {"openai": {"base_url": f"{url}/v1"}, "env": {"max_token_length": 16}}
    file = folder / "server.yaml"
    file.write_text(
        run_config.resolve_run_config("arithmetic", "embedded", edits, model=engine.model).to_yaml()
    )
    secrets = {
        "TINKER_BASE_URL": engine.url,
        "TINKER_API_KEY": engine.token,
        "LACHESIS_INFERENCE_TOKEN": "run-token",
    }
    command = [sys.executable, "-m", "lachesis.trainer", "--config", str(file), "--base-only"]
    env = {**secrets, "HF_HUB_OFFLINE": "1"}
    with run_program(command, folder / "log", f"{url}/health", **env) as process:
        yield url
        assert process.poll() is None, (folder / "log").read_text()


@pytest.mark.parametrize(
    ("method", "path"), [route for route in routes(SCHEMA) if not route[1].startswith("/base/")]
)
def test_no_request_is_answered_with_a_fault(server, method, path):
    fuzz(SCHEMA, method, path, server, TOKEN, examples=10)


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": {"prompt_token_ids": [1]}, "n": "many"},
        {"prompt": {"prompt_token_ids": [1]}, "n": 10**9},
        {"prompt": {"prompt_token_ids": [1]}, "max_tokens": -1},
        {"prompt": {"prompt_token_ids": [10**9]}, "n": 1},
        {"prompt": {}},
        {"input_ids": [1], "sampling_params": {"n": [], "temperature": "hot"}},
        {"input_ids": [1], "sampling_params": {"temperature": -3, "max_new_tokens": 4}},
        {"input_ids": [], "sampling_params": {}},
        {"text": "x", "sampling_params": {"stop": 7}},
        {},
        {"text": "\ud800", "sampling_params": {"max_new_tokens": 2}},
        {"text": "x", "sampling_params": {"stop": "\ud800"}},
        {"prompt": "\ud800"},
    ],
)
def test_wrong_samplings_are_faults_of_the_client(server, body):
    headers = {**TOKEN, "content-type": "application/json"}
    answer = httpx.post(
        f"{server}/generate", content=json.dumps(body), headers=headers, trust_env=False, timeout=20
    )
    assert 400 <= answer.status_code < 500, answer.text


@pytest.mark.parametrize(
    "change",
    [
        {"prompt": "\ud800"},
        {"stop": "\ud800"},
        {"temperature": float("nan")},
        {"model": "\ud800", "n": "x"},
    ],
)
def test_wrong_completions_are_faults_of_the_client(server, change):
    body = json.dumps({"prompt": "1+1=", "max_tokens": 2, **change})
    headers = {**TOKEN, "content-type": "application/json"}
    answer = httpx.post(
        f"{server}/v1/completions", content=body, headers=headers, trust_env=False, timeout=20
    )
    assert 400 <= answer.status_code < 500, answer.text


def test_strangers_are_refused(server):
    """What the server tells of itself needs no token, but the right names."""
    for method, path, headers, owed, came in refusals(SCHEMA, server):
        told = owed == 401 and path.endswith(SELF)
        assert came == (200 if told else owed), (method, path, headers)


def test_it_answers_after_all_that(server):
    body = {"messages": [{"role": "user", "content": "1+1="}], "max_tokens": 4}
    assert (
        httpx.post(
            f"{server}/v1/chat/completions", json=body, headers=TOKEN, trust_env=False
        ).status_code
        == 200
    )
