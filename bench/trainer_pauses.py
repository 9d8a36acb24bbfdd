"""Measure how long a large batch keeps the trainer's event loop, which serves inference, busy.

The batch has 128 rollouts of 8,000 tokens. The ratio compares the loop's longest pause while the
trainer fetches the batch and turns it into datums with the pause when `json.loads` and
`to_batch` run in the loop itself.

    python bench/trainer_pauses.py [--rollouts 128] [--tokens 8000]
"""

import argparse
import asyncio
import contextlib
import json
import random
import time
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np

from lachesis.inference_server.token_usage import Usage
from lachesis.trainer.batch.group_to_datums import BatchSettings, to_batch
from lachesis.trainer.loss_metrics import compute_rollout_metrics
from lachesis.trainer.rollout_client import RolloutClient

GROUP = 16
RECIPE = BatchSettings(max_tokens=100_000, eos_id=7)


def make_batch(rollouts: int, tokens: int) -> bytes:
    """Return a batch as the rollout API sends it."""
    draw = random.Random(0)
    groups = []
    for _ in range(rollouts // GROUP):
        ids = [[draw.randrange(150_000) for _ in range(tokens)] for _ in range(GROUP)]
        groups.append({
            "tokens": ids,
            "masks": [[-100] * 500 + row[500:] for row in ids],
            "inference_logprobs": [
                [1.0] * 500 + [float(np.float32(-draw.random())) for _ in row[500:]] for row in ids
            ],
            "scores": [float(number % 2) for number in range(GROUP)],
        })  # fmt: skip
    return json.dumps({"batch": groups}).encode()


async def serve_batch(body: bytes) -> asyncio.Server:
    headers = f"Content-Type: application/json\r\nContent-Length: {len(body)}"
    head = f"HTTP/1.1 200 OK\r\n{headers}\r\n\r\n".encode()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(
            asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError
        ):
            while await reader.readuntil(b"\r\n\r\n"):
                writer.write(head)
                for start in range(0, len(body), 1 << 18):
                    writer.write(body[start : start + (1 << 18)])
                    await writer.drain()
        writer.close()

    return await asyncio.start_server(answer, "127.0.0.1", 0)


async def measure_longest_pause(work: Callable[[], Awaitable[Any]]) -> tuple[float, float]:
    """Seconds that the loop did not get round for, at most, and that the work took."""
    longest, running = 0.0, True

    async def beat() -> None:
        nonlocal longest
        last = time.perf_counter()
        while running:
            await asyncio.sleep(0.001)
            now = time.perf_counter()
            longest, last = max(longest, now - last), now

    beating = asyncio.create_task(beat())
    await asyncio.sleep(0.05)
    longest = 0.0
    started = time.perf_counter()
    await work()
    took = time.perf_counter() - started
    await asyncio.sleep(0.01)
    running = False
    await beating
    return longest, took


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rollouts", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=8000)
    args = parser.parse_args()
    body = make_batch(args.rollouts, args.tokens)
    server = await serve_batch(body)
    atropos = RolloutClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")

    async def in_the_loop() -> None:
        groups = json.loads((await atropos._http.get("/batch")).content)["batch"]
        to_batch(groups, RECIPE)
        compute_rollout_metrics(groups, Usage())

    async def beside_it() -> None:
        groups = await atropos.next_batch(0)
        await asyncio.to_thread(to_batch, groups, RECIPE)
        await asyncio.to_thread(compute_rollout_metrics, groups, Usage())

    pauses = {}
    for name, work in (("in the loop", in_the_loop), ("beside it", beside_it)):
        rounds = [await measure_longest_pause(work) for _ in range(3)]
        pause, took = (sorted(values)[1] for values in zip(*rounds, strict=True))
        pauses[name] = pause
        print(f"{name}: longest pause {1000 * pause:.0f} ms, {took:.2f} s in all")
    print(
        f"{len(body) / 1e6:.0f} MB of JSON; ratio of the pauses "
        f"{pauses['beside it'] / pauses['in the loop']:.3f}"
    )
    await atropos.close()
    server.close()


if __name__ == "__main__":
    asyncio.run(main())
