"""The model in training, as the trainer holds it."""

import asyncio
import time

from lachesis.base.tinker_client import open_rest_client
from lachesis.config import run_config as run_config
from lachesis.trainer.trained_model import Policy


async def test_the_trainer_answers_while_a_deletion_waits_for_a_dead_server(
    engine, start_engine, random_model, monkeypatch
):
    """Who asks how the run is would otherwise wait until the client has given up, which takes
    minutes. A server that this process has asked before, and which lives, is not asked instead.
    """
    monkeypatch.setenv("TINKER_BASE_URL", engine.url)
    monkeypatch.setenv("TINKER_API_KEY", engine.token)
    with open_rest_client():
        pass
    engine = start_engine(random_model)
    monkeypatch.setenv("TINKER_BASE_URL", engine.url)
    monkeypatch.setenv("TINKER_API_KEY", engine.token)
    policy = await Policy.create(
        run_config.resolve_run_config("replay", "embedded", {}, model=random_model),
        resume_from=None,
    )
    path = (await policy.save("one"))["state"]
    engine.process.kill()
    engine.process.wait()
    waiting = asyncio.create_task(policy.delete(path))
    slowest = 0.0
    for _ in range(20):
        before = time.monotonic()
        await asyncio.sleep(0.05)
        slowest = max(slowest, time.monotonic() - before)
    assert not waiting.done()
    waiting.cancel()
    assert slowest < 1
