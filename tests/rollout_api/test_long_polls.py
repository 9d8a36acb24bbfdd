"""A trainer that waits for a batch leaves nothing behind when none comes."""

import asyncio
from types import SimpleNamespace
from typing import Any

from lachesis.rollout_api.routes import BoundedRolloutServer


async def test_a_poll_that_times_out_leaves_no_task():
    state: Any = SimpleNamespace(batchsize=8, queue=[], curr_batch=[], envs=[])
    server = BoundedRolloutServer(SimpleNamespace(state=state), max_waiting_batches=1)
    disconnected = asyncio.Event()

    async def receive():
        await disconnected.wait()

    before = asyncio.all_tasks()
    for _ in range(3):
        assert await server._wait_for_batch(receive, 0.05)
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == before
