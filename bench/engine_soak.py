"""Load one engine with many clients for a long time, and print its errors and memory.

Each of the 64 threads repeatedly opens a session, samples, trains a little, and closes it.

    python bench/engine_soak.py [--minutes 60] [--clients 64]
"""

import argparse
import random
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from engine import TOKEN, ready, running
from table import show

from lachesis.supervision.services.ports import reserve_free_ports
from lachesis.tiny_model import build

ROUNDS = 20
"""Of one session; every fourth client also trains an adapter."""
CLOSE_S = 10
"""A session is given up after that; the SDK can wait for its own heartbeat for ever."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--clients", type=int, default=64)
    args = parser.parse_args()
    model, port = str(build.ensure_tiny_model(build.TinyModelRecipe())), reserve_free_ports(1)[0]
    url, counts = f"http://127.0.0.1:{port}", {"rounds": 0, "sessions": 0, "errors": 0}
    sizes: list[tuple[float, float]] = []
    with tempfile.TemporaryDirectory() as store:
        command = [
            sys.executable,
            "-m",
            "lachesis.engine",
            "--model",
            model,
            "--port",
            str(port),
            "--store",
            store,
        ]
        with running(command, {"LACHESIS_ENGINE_TOKEN": TOKEN}) as process:
            ready(url, process)
            started = time.monotonic()
            until = started + 60 * args.minutes
            for number in range(args.clients):
                threading.Thread(
                    target=run_client, args=(url, model, number, until, counts), daemon=True
                ).start()
            while time.monotonic() < until:
                time.sleep(min(10.0, max(0.1, until - time.monotonic())))
                status = Path(f"/proc/{process.pid}/status").read_text()
                sizes.append(
                    (time.monotonic() - started, int(status.split("VmRSS:")[1].split()[0]) / 1e3)
                )
    rows: list[list[object]] = [
        [f"{seconds / 60:.1f}", f"{size:.0f}"]
        for seconds, size in sizes[:: max(1, len(sizes) // 10)]
    ]
    show(f"soak, {args.clients} clients: {counts}", ["minute", "MB of the engine"], rows)


def run_client(url: str, model: str, number: int, until: float, counts: dict[str, int]) -> None:
    draw = random.Random(number)
    while time.monotonic() < until:
        try:
            run_session(url, model, draw, number % 4 == 0, until, counts)
        except Exception as error:
            if time.monotonic() < until:
                counts["errors"] += 1
                print(f"client {number}: {type(error).__name__}: {error}", file=sys.stderr)


def run_session(
    url: str, model: str, draw: random.Random, trains: bool, until: float, counts: dict[str, int]
) -> None:
    import numpy as np
    import tinker

    service = tinker.ServiceClient(base_url=url, api_key=TOKEN)
    sampler = service.create_sampling_client(base_model=model).result()
    training = (
        service.create_lora_training_client(base_model=model, rank=8).result() if trains else None
    )
    for _ in range(ROUNDS):
        if time.monotonic() > until:
            break
        prompt = [draw.randrange(250) for _ in range(draw.randint(1, 40))]
        params = tinker.SamplingParams(max_tokens=draw.randint(1, 30), stop=[])
        sampler.sample(tinker.ModelInput.from_ints(prompt), draw.randint(1, 8), params).result()
        if training is not None:
            tokens = np.array(prompt)
            inputs: dict[str, Any] = {
                "target_tokens": tokens,
                "weights": np.ones(len(tokens), np.float32),
            }
            training.forward_backward(
                [
                    tinker.Datum(
                        model_input=tinker.ModelInput.from_ints(prompt), loss_fn_inputs=inputs
                    )
                ],
                "cross_entropy",
            )
            training.optim_step(tinker.AdamParams(learning_rate=1e-4)).result()
            sampler = training.save_weights_and_get_sampling_client().result()
        counts["rounds"] += 1
    ended = threading.Thread(target=lambda: service.close("success").result(), daemon=True)
    ended.start()
    ended.join(CLOSE_S)
    counts["sessions"] += 1


if __name__ == "__main__":
    main()
