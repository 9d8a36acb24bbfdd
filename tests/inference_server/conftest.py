"""The inference server on a real engine and a real port."""

import asyncio

import httpx
import pytest
from transformers import AutoTokenizer

from lachesis.config import run_config as run_config
from lachesis.inference_server.app import create_app
from lachesis.inference_server.serving import bind_inference_socket, serve_in_background
from lachesis.supervision.services.ports import reserve_free_ports
from lachesis.trainer.trained_model import Policy
from lachesis.trainer.trainer_state import TrainerState
from tests.harness.waiting import call_again


@pytest.fixture
async def server(engine, monkeypatch):
    """The application on a real port; its address."""
    monkeypatch.setenv("TINKER_BASE_URL", engine.url)
    monkeypatch.setenv("TINKER_API_KEY", engine.token)
    url = f"http://127.0.0.1:{reserve_free_ports(1)[0]}"
    edits = {"openai": {"base_url": f"{url}/v1"}, "env": {"max_token_length": 16}}
    config = run_config.resolve_run_config("arithmetic", "embedded", edits, model=engine.model)
    policy = await Policy.create(config, resume_from=None)
    await policy.publish()
    app = create_app(
        policy, AutoTokenizer.from_pretrained(engine.model), config, TrainerState("training", 7)
    )
    with bind_inference_socket(config) as sock:
        async with serve_in_background(app, sock):
            await until_answers(f"{url}/health")
            yield url
    await policy.close("success")


async def until_answers(url):
    await asyncio.to_thread(call_again, lambda: httpx.get(url), httpx.HTTPError, 20)
