"""The real Atropos API."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from lachesis import config as configuration
from lachesis.errors import BatchError, ServerDownError
from lachesis.supervision.process import free_ports
from lachesis.trainer.atropos import Atropos
from tests.conftest import api_process

CONFIG = configuration.resolve("arithmetic", "embedded", {"env": {"batch_size": 4, "group_size": 2}})


def scored(*scores: float) -> dict[str, Any]:
    count = len(scores)
    rollouts: dict[str, Any] = {"tokens": [[1, 2]] * count, "masks": [[-100, 2]] * count, "scores": list(scores)}
    return {**rollouts, "inference_logprobs": [[1.0, -1.0]] * count}


async def post(url: str, group: dict[str, Any]) -> None:
    async with httpx.AsyncClient() as client:
        answer = await client.post(
            f"{url}/scored_data", content=json.dumps(group), headers={"Content-Type": "application/json"}
        )
        assert answer.status_code == 200


async def test_batches_arrive_once_they_are_full(api: str, tmp_path: Path) -> None:
    atropos = Atropos(api)
    await atropos.register(CONFIG, first_step=0, checkpoint_dir=tmp_path)
    waiting = asyncio.create_task(atropos.next_batch(0))
    await post(api, scored(1.0, 0.0))
    await asyncio.sleep(0.3)
    assert not waiting.done()
    await post(api, scored(0.5, 0.0))
    groups = await asyncio.wait_for(waiting, 10)
    assert sorted(tuple(group["scores"]) for group in groups) == [(0.5, 0.0), (1.0, 0.0)]
    await atropos.close()


async def test_an_api_that_was_started_anew_is_told_again(tmp_path: Path) -> None:
    """The trainer waits while there is none, and goes on at its step."""
    with api_process(tmp_path) as (url, first):
        atropos = Atropos(url)
        await atropos.register(CONFIG, first_step=0, checkpoint_dir=tmp_path)
        waiting = asyncio.create_task(atropos.next_batch(7))
        await asyncio.sleep(0.2)
        first.kill()
        first.wait()
        await asyncio.sleep(1)
        assert not waiting.done()
    with api_process(tmp_path, port=int(url.rsplit(":", 1)[1])):
        async with httpx.AsyncClient() as client:
            for _ in range(100):
                told = (await client.get(f"{url}/status")).json().get("current_step")
                if told == 7:
                    break
                await asyncio.sleep(0.1)
            assert told == 7
        for _ in range(2):
            await post(url, scored(1.0, 0.0))
        assert len(await asyncio.wait_for(waiting, 10)) == 2


async def test_an_api_that_stays_away_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lachesis.trainer.atropos.PATIENCE_S", 0.5)
    with pytest.raises(ServerDownError, match="does not answer /batch: ConnectError"):
        await Atropos(f"http://127.0.0.1:{free_ports(1)[0]}").next_batch(0)


async def test_data_from_before_the_registration_does_not_block(api: str, tmp_path: Path) -> None:
    """A left-over environment would poison an API that nobody has registered at."""
    await post(api, scored(1.0, 0.0))
    atropos = Atropos(api)
    await atropos.register(CONFIG, first_step=5, checkpoint_dir=tmp_path)
    async with httpx.AsyncClient() as client:
        assert (await client.get(f"{api}/status")).json()["current_step"] == 5
    for _ in range(2):
        await post(api, scored(1.0, 0.0))
    assert len(await asyncio.wait_for(atropos.next_batch(0), 10)) == 2
    await atropos.close()


async def test_a_score_that_is_not_a_number_is_told(api: str, tmp_path: Path) -> None:
    atropos = Atropos(api)
    await atropos.register(CONFIG, first_step=0, checkpoint_dir=tmp_path)
    for _ in range(2):
        await post(api, scored(float("nan"), 0.0))
    with pytest.raises(BatchError, match="a group held a score that is NaN or infinite"):
        await atropos.next_batch(0)
    await atropos.close()


async def test_an_api_that_is_not_there_is_told(tmp_path: Path) -> None:
    atropos = Atropos("http://127.0.0.1:9")
    with pytest.raises(ServerDownError, match=r"Atropos API at http://127.0.0.1:9 does not answer /reset_data"):
        await atropos.register(CONFIG, first_step=0, checkpoint_dir=tmp_path)
