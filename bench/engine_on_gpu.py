"""Measure the embedded engine on one GPU, beside what PyTorch and transformers do alone.

    python bench/engine_on_gpu.py [--sizes 0.6B 4B 8B] [--json FILE] [--vllm PYTHON]

The models are Qwen3 of the sizes named, with random weights, so nothing is downloaded. Through the
Tinker SDK it measures sampling, training, and a round of GRPO: 16 answers of 1,024 tokens to one
prompt, one update, new weights. In a process of its own, `generate` samples the same number of
tokens and PEFT trains on as many. The forecast of memory is compared with what a pass really takes.
`--vllm` is the interpreter of an environment with vLLM; without one that column stays empty.
"""

import argparse
import importlib.metadata
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine import TOKEN, run_server, wait_until_ready
from table import show

from lachesis.base.tinker_client import wait_for_sdk
from lachesis.supervision.services.ports import reserve_free_ports

# Width, width of the MLP, layers, heads, heads for keys and values, and whether the head is tied.
SIZES = {
    "0.6B": (1024, 3072, 28, 16, 8, True),
    "4B": (2560, 9728, 36, 32, 8, True),
    "8B": (4096, 12288, 36, 32, 8, False),
}
RANK = 16
PROMPT_TOKENS = 64
LONG_SEQUENCE = 16_384
ANSWERS, ANSWER_TOKENS = 16, 1024
NEVER_SAMPLED = 151_935
Numbers = dict[str, float | str]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    parser.add_argument("--vllm", metavar="PYTHON")
    parser.add_argument("--skip", nargs="*", default=[], help="parts to leave out")
    parser.add_argument("--part", nargs=2, metavar=("NAME", "FOLDER"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        print(json.dumps(PARTS[args.part[0]](args.part[1])))
        return
    results: dict[str, Numbers] = {}
    for size in args.sizes:
        with tempfile.TemporaryDirectory() as folder:
            write_random_model(size, Path(folder))
            results[size] = measure_size(folder, args.vllm, args.skip)
        if args.json:
            args.json.write_text(json.dumps(results, indent=1))
    print_tables(results)


def write_random_model(size: str, folder: Path) -> None:
    """Write a Qwen3 with random bfloat16 weights, and a tokenizer, which is not used."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    from lachesis.tiny_model import build

    width, mlp_width, layers, heads, key_heads, is_tied = SIZES[size]
    config = Qwen3Config(
        vocab_size=151_936, hidden_size=width, intermediate_size=mlp_width,
        num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=key_heads, head_dim=128,
        max_position_embeddings=40_960, tie_word_embeddings=is_tied,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    build.build_tokenizer().save_pretrained(folder)


def measure_size(folder: str, vllm: str | None, skipped: list[str]) -> Numbers:
    """Measure every part in a process of its own, so that each has all of the memory."""
    numbers: Numbers = {}
    if "engine" not in skipped:
        numbers |= measure_engine(folder)
    for name in PARTS:
        if name in skipped:
            continue
        python = sys.executable
        if name == "vllm":
            if vllm is None:
                continue
            python = vllm
        numbers |= run_part(python, name, folder)
    return numbers


def run_part(python: str, name: str, folder: str) -> Numbers:
    done = subprocess.run(
        [python, __file__, "--part", name, folder], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        print(f"{name} failed: {done.stderr[-1500:]}", file=sys.stderr, flush=True)
        return {f"{name} failed": done.stderr.strip().splitlines()[-1]}
    numbers: Numbers = json.loads(done.stdout.splitlines()[-1])
    for name, value in numbers.items():
        record(numbers, name, value)
    return numbers


def make_tokens(count: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(150_000) for _ in range(count)]


def record(numbers: Numbers, name: str, value: float | str) -> None:
    """Add a number, and print it at once: the whole takes a quarter of an hour."""
    numbers[name] = value
    print(f"{name}: {_format(value)}", file=sys.stderr, flush=True)


def measure_s(call: Callable[..., Any], *args: Any) -> float:
    """Return how many seconds a call takes."""
    started = time.perf_counter()
    call(*args)
    return time.perf_counter() - started


# --- the engine, through the SDK


def measure_engine(folder: str) -> Numbers:
    port = reserve_free_ports(1)[0]
    with tempfile.TemporaryDirectory() as store:
        command = [
            sys.executable, "-m", "lachesis.engine", "--model", folder, "--port", str(port),
            "--store", store, "--rank", str(RANK), "--sequence-tokens", str(LONG_SEQUENCE),
        ]  # fmt: skip
        started = time.perf_counter()
        with run_server(command, {"LACHESIS_ENGINE_TOKEN": TOKEN}) as process:
            wait_until_ready(f"http://127.0.0.1:{port}", process)
            numbers: Numbers = {"start, s": time.perf_counter() - started}
            numbers |= measure_through_sdk(f"http://127.0.0.1:{port}", folder)
            numbers["engine's process, GiB"] = read_process_gib(process.pid)
    return numbers


def measure_through_sdk(url: str, folder: str) -> Numbers:
    import tinker
    from tinker import types

    service = tinker.ServiceClient(base_url=url, api_key=TOKEN)
    training = wait_for_sdk(service.create_lora_training_client(base_model=folder, rank=RANK))
    adam = types.AdamParams(learning_rate=1e-6)

    def publish() -> Any:
        return wait_for_sdk(training.save_weights_and_get_sampling_client())

    def sample(sampler: Any, prompts: int, answers: int, new_tokens: int) -> list[Any]:
        params = types.SamplingParams(max_tokens=new_tokens, temperature=1.0, stop=[NEVER_SAMPLED])
        futures = [
            sampler.sample(
                types.ModelInput.from_ints(make_tokens(PROMPT_TOKENS, seed)), answers, params
            )
            for seed in range(prompts)
        ]
        return [future.result() for future in futures]

    def train(data: list[Any], loss: str) -> None:
        forward, update = training.forward_backward(data, loss), training.optim_step(adam)
        forward.result()
        update.result()

    sampler = publish()
    sample(sampler, 2, 2, 8)
    numbers: Numbers = {}
    for prompts, answers, new_tokens in ((1, 1, 64), (1, 16, 128), (8, 16, 128)):
        seconds = measure_s(sample, sampler, prompts, answers, new_tokens)
        rate = prompts * answers * new_tokens / seconds
        record(numbers, f"engine, sampling {prompts * answers} at once, tok/s", rate)
    for name, lengths in (("16 x 1,024", [1024] * 16), ("1 x 16,384", [LONG_SEQUENCE])):
        data = [make_datum(make_tokens(length + 1, 100 + length)) for length in lengths]
        train(data, "cross_entropy")
        seconds = measure_s(train, data, "cross_entropy")
        record(numbers, f"engine, training {name}, tok/s", sum(lengths) / seconds)
    numbers |= measure_grpo_round(publish, sample, train)
    return numbers


def measure_grpo_round(publish: Any, sample: Any, train: Any) -> Numbers:
    """Sample a group, train on it, and hand the new weights to sampling."""
    sampler = publish()
    numbers: Numbers = {}
    results: list[Any] = []
    sampling_s = measure_s(lambda: results.extend(sample(sampler, 1, ANSWERS, ANSWER_TOKENS)))
    record(numbers, "GRPO, sampling, s", sampling_s)
    data = [
        make_datum(make_tokens(PROMPT_TOKENS, 0) + sequence.tokens, sequence.logprobs, index)
        for index, sequence in enumerate(results[0].sequences)
    ]
    update_s = measure_s(train, data, "importance_sampling")
    record(numbers, "GRPO, update, s", update_s)
    new_weights_s = measure_s(lambda: sample(publish(), 1, 1, 1))
    record(numbers, "GRPO, new weights, s", new_weights_s)
    record(numbers, "GRPO, round, s", sampling_s + update_s + new_weights_s)
    return numbers


def make_datum(tokens: list[int], logprobs: list[float] | None = None, index: int = 0) -> Any:
    """Return a datum for cross_entropy, or for importance_sampling if log-probabilities come."""
    import numpy as np
    from tinker import types

    length = len(tokens) - 1
    inputs: dict[str, Any] = {"target_tokens": np.array(tokens[1:], np.int64)}
    if logprobs is None:
        inputs["weights"] = np.ones(length, np.float32)
    else:
        padding = np.zeros(length - len(logprobs), np.float32)
        advantage = 1.0 if index % 2 else -1.0
        inputs["logprobs"] = np.concatenate([padding, np.array(logprobs, np.float32)])
        advantages = np.full(len(logprobs), advantage, np.float32)
        inputs["advantages"] = np.concatenate([padding, advantages])
    tensors = {key: types.TensorData.from_numpy(value) for key, value in inputs.items()}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=tensors)


def read_process_gib(pid: int) -> float | str:
    """Return the memory of a process on the card, as `nvidia-smi` tells it."""
    query = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    try:
        lines = subprocess.run(
            query, capture_output=True, text=True, check=True
        ).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    used = {int(pid): float(mib) for pid, mib in (line.split(",") for line in lines)}
    return used[pid] / 1024 if pid in used else "unknown"


# --- the others, each in a process of its own


def measure_generate(folder: str) -> Numbers:
    """Sample with `generate`, one batch of equal prompts, without an adapter."""
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).cuda().eval()

    def generate(rows: int, new_tokens: int) -> None:
        ids = torch.tensor([make_tokens(PROMPT_TOKENS, 0)] * rows, device="cuda")
        model.generate(
            ids, max_new_tokens=new_tokens, min_new_tokens=new_tokens, do_sample=True, top_k=0,
            temperature=1.0,
        )  # fmt: skip
        torch.cuda.synchronize()

    generate(2, 8)
    numbers: Numbers = {}
    for rows, new_tokens in ((1, 64), (16, 128), (128, 128)):
        seconds = measure_s(generate, rows, new_tokens)
        numbers[f"generate, sampling {rows} at once, tok/s"] = rows * new_tokens / seconds
    return numbers


def measure_peft(folder: str) -> Numbers:
    """Train with PEFT and recomputed activations, as a loop by hand does."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).cuda()
    base.gradient_checkpointing_enable({"use_reentrant": False})
    base.enable_input_require_grads()
    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    lora = LoraConfig(r=RANK, lora_alpha=32, target_modules=names, task_type="CAUSAL_LM")
    model: Any = get_peft_model(base, lora).train()
    parameters = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-6, fused=True)

    def train(lengths: list[int]) -> None:
        for length in lengths:
            ids = torch.tensor([make_tokens(length, 100 + length)], device="cuda")
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()

    numbers: Numbers = {}
    for name, lengths in (("16 x 1,024", [1024] * 16), ("1 x 16,384", [LONG_SEQUENCE])):
        train(lengths)
        seconds = measure_s(train, lengths)
        numbers[f"PEFT by hand, training {name}, tok/s"] = sum(lengths) / seconds
    return numbers


def measure_memory(folder: str) -> Numbers:
    """Compare the forecast of a pass of 4,096 tokens with what PyTorch allocates for it."""
    import numpy as np
    import torch
    from transformers import AutoConfig

    from lachesis.engine.adapter_training import TrainingModel
    from lachesis.engine.base_model.forward_pass import BaseLanguageModel
    from lachesis.engine.base_model.memory_forecast import measure_model_sizes
    from lachesis.engine.base_model.memory_plan import MemoryPlan
    from lachesis.tinker_server.model_description import LoraSpec
    from lachesis.tinker_server.protobuf_messages import DecodedDatum

    config = AutoConfig.from_pretrained(folder)
    numbers: Numbers = {}
    numbers["forecast takes, s"] = measure_s(
        lambda: measure_model_sizes(config, rank=RANK, dtype=torch.bfloat16)
    )
    sizes = measure_model_sizes(config, rank=RANK, dtype=torch.bfloat16)
    base = BaseLanguageModel(folder)
    model = TrainingModel(base, LoraSpec(rank=RANK, seed=0))
    tokens = np.array(make_tokens(2049, 0))
    inputs = {"target_tokens": tokens[1:], "weights": np.ones(2048, np.float32)}
    data = [DecodedDatum(tokens[:-1], inputs)] * 2
    for name, size in (("plain", sizes.plain_pass), ("recomputed", sizes.recomputed_pass)):
        max_plain_tokens = None if name == "plain" else 0
        base.memory_plan = MemoryPlan(limits_logits=False, max_plain_tokens=max_plain_tokens)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        for _ in model.forward_backward(data, "cross_entropy", {}, forward_only=False):
            pass
        measured = torch.cuda.max_memory_allocated() / 2**30
        # Parameters and gradients; Adam's moments come with the first step.
        fixed = sizes.weights_bytes + 2 * sizes.adapter_bytes
        forecast = (fixed + size.compute_bytes(4096)) / 2**30
        numbers[f"memory, {name}, measured, GiB"] = measured
        numbers[f"memory, {name}, forecast / measured"] = forecast / measured
        numbers[f"memory, {name}, reserved, GiB"] = torch.cuda.max_memory_reserved() / 2**30
    return numbers


def measure_vllm(folder: str) -> Numbers:
    """Sample with vLLM, one batch of equal prompts, without an adapter."""
    from vllm import LLM, SamplingParams

    llm = LLM(folder, dtype="bfloat16", max_model_len=4096, skip_tokenizer_init=True)
    numbers: Numbers = {}
    for rows, new_tokens in ((1, 64), (16, 128), (128, 128)):
        params = SamplingParams(max_tokens=new_tokens, ignore_eos=True, detokenize=False)
        prompts = [{"prompt_token_ids": make_tokens(PROMPT_TOKENS, 0)}] * rows
        seconds = measure_s(llm.generate, prompts, params, False)
        numbers[f"vLLM, sampling {rows} at once, tok/s"] = rows * new_tokens / seconds
    return numbers


PARTS: dict[str, Callable[[str], Numbers]] = {
    "generate": measure_generate,
    "peft": measure_peft,
    "memory": measure_memory,
    "vllm": measure_vllm,
}


def print_tables(results: dict[str, Numbers]) -> None:
    names = list(dict.fromkeys(name for numbers in results.values() for name in numbers))
    rows = [
        [name, *(_format(numbers.get(name, "–")) for numbers in results.values())] for name in names
    ]
    versions = ", ".join(
        f"{name} {importlib.metadata.version(name)}" for name in ("torch", "transformers")
    )
    show(f"one GPU, Qwen3 with random weights, rank {RANK}, {versions}", ["", *results], rows)


def _format(value: float | str) -> str:
    if isinstance(value, str):
        return value
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TINKER_TELEMETRY", "0")
    main()
