"""The embedded engine through the real SDK, beside what the same model does in this process without a server.

python bench/engine.py [--model FOLDER] [--repeat 20]

The bound is a plain Hugging Face loop on the merged model, with a cache and nothing around it. The references are SkyRL-tx
0.x on the CPU of such a machine.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
from table import show

from lachesis import models
from lachesis.supervision.process import free_ports

TOKEN = "tml-bench"
PROMPT = [256, 18, 10, 19, 28, 258, 257]
SAMPLES, TOKENS = 16, 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--repeat", type=int, default=20)
    args = parser.parse_args()
    model = str(args.model or models.build(models.Recipe()))
    with tempfile.TemporaryDirectory() as folder:
        measured = engine_times(model, Path(folder), args.repeat)
    bound = bound_times(model, args.repeat)
    rows = []
    for name, target, reference in (
        ("server start to first sample", 8.0, 25.0),
        ("16 samples x 16 tokens, warm", 0.06, 0.125),
        ("16 samples x 16 tokens, new weights", 0.06, 0.27),
        ("train step of 16 short sequences", 0.1, 0.286),
    ):
        value = measured[name]
        against = f"{value / bound[name]:.2f}" if name in bound else "–"
        rows.append([name, f"{value:.3f}", target, against, f"{reference / value:.1f}"])
    rows.append(["peak memory, GB", f"{measured['peak memory']:.2f}", 1.5, "–", "–"])
    show("engine", ["what (seconds, median)", "measured", "target", "x of the bound", "times faster than SkyRL-tx"], rows)


def median(call: Callable[[], Any], repeat: int) -> float:
    for _ in range(3):
        call()
    times = []
    for _ in range(repeat):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def engine_times(model: str, folder: Path, repeat: int) -> dict[str, float]:
    import tinker  # before the clock starts: the client's import is not the server's

    port = free_ports(1)[0]
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "lachesis.engine", "--model", model, "--port", str(port), "--store", str(folder)]
    started = time.perf_counter()
    server = subprocess.Popen(command, env={**os.environ, "LACHESIS_ENGINE_TOKEN": TOKEN, "HF_HUB_OFFLINE": "1"})
    try:
        while True:
            try:
                httpx.get(f"{url}/api/v1/healthz", headers={"X-API-Key": TOKEN}).raise_for_status()
                break
            except httpx.HTTPError:
                time.sleep(0.02)
        service = tinker.ServiceClient(base_url=url, api_key=TOKEN)
        sampler = service.create_sampling_client(base_model=model).result()
        sample(sampler)
        result = {"server start to first sample": time.perf_counter() - started}
        training = service.create_lora_training_client(base_model=model, rank=32, seed=0).result()
        result |= train_and_sample(training, repeat)
        peak = Path(f"/proc/{server.pid}/status").read_text().split("VmHWM:")[1].split()[0]
        result["peak memory"] = int(peak) * 1024 / 1e9
        return result
    finally:
        server.terminate()
        server.wait()


def sample(sampler: Any) -> None:
    import tinker

    params = tinker.SamplingParams(max_tokens=TOKENS, temperature=1.0, stop=[])
    answer = sampler.sample(tinker.ModelInput.from_ints(PROMPT), SAMPLES, params).result()
    assert len(answer.sequences) == SAMPLES


def train_and_sample(training: Any, repeat: int) -> dict[str, float]:
    import numpy as np
    import tinker

    tokens = np.arange(16) % 250
    inputs = {"target_tokens": tokens, "logprobs": np.full(16, -5.0, np.float32), "advantages": np.ones(16, np.float32)}
    data = [tinker.Datum(model_input=tinker.ModelInput.from_ints(tokens.tolist()), loss_fn_inputs=inputs)] * SAMPLES

    def step() -> None:
        forward = training.forward_backward(data, "importance_sampling")
        optim = training.optim_step(tinker.AdamParams(learning_rate=1e-5))
        forward.result()
        optim.result()

    sampler = training.save_weights_and_get_sampling_client().result()
    warm = median(lambda: sample(sampler), repeat)
    fresh = []
    for _ in range(repeat):
        step()
        sampler = training.save_weights_and_get_sampling_client().result()
        started = time.perf_counter()
        sample(sampler)
        fresh.append(time.perf_counter() - started)
    return {
        "16 samples x 16 tokens, warm": warm,
        "16 samples x 16 tokens, new weights": statistics.median(fresh),
        "train step of 16 short sequences": median(step, repeat),
    }


def bound_times(model: str, repeat: int) -> dict[str, float]:
    """The same arithmetic in this process: Hugging Face's model and cache, no LoRA, no HTTP, no futures."""
    import torch
    from transformers import AutoModelForCausalLM, DynamicCache

    module = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)

    @torch.inference_mode()
    def generate() -> None:
        ids, cache = torch.tensor([PROMPT] * SAMPLES), DynamicCache(config=module.config)
        for _ in range(TOKENS):
            logits = module(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
            ids = torch.multinomial(torch.softmax(logits, -1), 1)

    def step() -> None:
        ids = torch.arange(16).repeat(SAMPLES, 1)
        torch.log_softmax(module(input_ids=ids).logits, -1).sum().backward()

    sampling = median(generate, repeat)
    return {
        "16 samples x 16 tokens, warm": sampling,
        "16 samples x 16 tokens, new weights": sampling,
        "train step of 16 short sequences": median(step, repeat),
    }


if __name__ == "__main__":
    main()
