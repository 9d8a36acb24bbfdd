"""Compare the speed of the embedded engine with what a user could take instead.

All contenders run on this machine in one run; the table has the ratios of ours to the others.

    python bench/engine_speed.py [--model FOLDER …] [--skyrl PYTHON]

Without `--model` the tiny model of `lachesis demo`, and a randomly initialised Qwen3 of 48 million
parameters. On a machine with a GPU the same script measures there. `--skyrl` is the interpreter of
an environment of its own, with SkyRL-tx:

    pip install "skyrl-tx[tinker]==0.3.0" tinker==0.16.1 jax flax optax

`bench/programs/sample_and_train.py` does the work that is timed. `no model at all` is our server
with answers that cost nothing (`bench/programs/engine_without_compute.py`): the speed that the SDK
and HTTP allow, which no server can exceed.
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
from table import show

from lachesis.base import paths
from lachesis.supervision.services.ports import reserve_free_ports
from lachesis.tiny_model import build

TOKEN = "tml-bench"
WORK = str(Path(__file__).parent / "programs" / "sample_and_train.py")
ROWS = ("sample 1", "sample 16", "sample 128", "sample 8x16", "train")
Rates = dict[str, float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, action="append", default=[])
    parser.add_argument("--skyrl", metavar="PYTHON")
    args = parser.parse_args()
    for model in args.model or [build.ensure_tiny_model(build.TinyModelRecipe()), medium()]:
        compare_engines(str(model), args.skyrl)


def medium() -> Path:
    """Return a Qwen3 of 48 million parameters with random weights and the tiny model's tokenizer;
    build it once.
    """
    folder = paths.models_dir() / "bench-48m"
    if not (folder / "config.json").exists():
        import torch
        from transformers import Qwen3Config, Qwen3ForCausalLM

        torch.manual_seed(0)
        config = Qwen3Config(
            vocab_size=32_000, hidden_size=512, intermediate_size=1536, num_hidden_layers=10,
            num_attention_heads=8,
            num_key_value_heads=4, head_dim=64, max_position_embeddings=2048,
            tie_word_embeddings=True, eos_token_id=258,
        )  # fmt: skip
        Qwen3ForCausalLM(config).save_pretrained(folder)
        build.build_tokenizer().save_pretrained(folder)
    return folder


def compare_engines(model: str, skyrl: str | None) -> None:
    measures = {
        "Lachesis": lambda: measure_lachesis(model),
        "no model at all": lambda: measure_lachesis(
            model, [str(Path(__file__).parent / "programs" / "engine_without_compute.py")]
        ),
        "torch by hand": lambda: run_work(sys.executable, "torch", model),
        "generate per request": lambda: run_work(sys.executable, "generate", model),
    }
    if skyrl:
        measures["SkyRL-tx"] = lambda: measure_skyrl(model, skyrl)
    contenders = {}
    for name, measure in measures.items():
        contenders[name] = measure()
        print(name, json.dumps(contenders[name]), file=sys.stderr, flush=True)
    mine = contenders["Lachesis"]
    others = {name: rates for name, rates in contenders.items() if name != "Lachesis"}
    rows: list[list[object]] = []
    for name in ROWS:
        ratios = [
            f"{mine[name] / rates[name]:.2f}" if name in rates else "–" for rates in others.values()
        ]
        rows.append([f"{name}, tokens per second", f"{mine[name]:,.0f}", *ratios])
    for name, unit in (
        ("start to first answer", "s"),
        ("swap", "s beyond a first token"),
        ("peak memory", "GB"),
    ):
        ratios = [
            f"{rates[name] / mine[name]:.2f}" if name in rates else "–" for rates in others.values()
        ]
        rows.append([f"{name}, {unit}", f"{mine[name]:.3f}", *ratios])
    columns = ["what", "Lachesis", *(f"times {name}" for name in others)]
    show(f"engine, {Path(model).name} (above 1: ours is faster, or smaller)", columns, rows)


def run_work(python: str, kind: str, *rest: str) -> Rates:
    env = {**os.environ, "TINKER_TELEMETRY": "0", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [python, WORK, kind, *rest], env=env, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise SystemExit(f"{kind} failed: {done.stderr[-3000:]}")
    rates: Rates = json.loads(done.stdout.splitlines()[-1])
    return {"peak memory": rates["memory of this process"], **rates} if kind != "server" else rates


def measure_lachesis(model: str, program: list[str] | None = None) -> Rates:
    with tempfile.TemporaryDirectory() as store:
        port = reserve_free_ports(1)[0]
        program = program or ["-m", "lachesis.engine"]
        command = [
            sys.executable,
            *program,
            "--model",
            model,
            "--port",
            str(port),
            "--store",
            store,
        ]
        return measure_process(
            command,
            {"LACHESIS_ENGINE_TOKEN": TOKEN},
            f"http://127.0.0.1:{port}",
            sys.executable,
            model,
        )


def measure_skyrl(model: str, python: str) -> Rates:
    """Measure SkyRL's engine.

    It starts itself with `uv`, which a script replaces here, so that the existing environment is
    used. Its older transformers knows the tokenizer's class and one setting by other names.
    """
    with tempfile.TemporaryDirectory() as store:
        copy = Path(store) / "model"
        shutil.copytree(model, copy)
        about = json.loads((copy / "tokenizer_config.json").read_text())
        about = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **{key: about.get(key) for key in ("eos_token", "pad_token")},
        }
        (copy / "tokenizer_config.json").write_text(json.dumps(about))
        config = json.loads((copy / "config.json").read_text())
        (copy / "config.json").write_text(
            json.dumps({**config, "rope_theta": config["rope_parameters"]["rope_theta"]})
        )
        model = str(copy)
        port = reserve_free_ports(1)[0]
        uv = Path(store) / "uv"
        uv.write_text(f'#!/bin/sh\nwhile [ "$1" != -m ]; do shift; done\nexec {python} "$@"\n')
        uv.chmod(0o700)
        command = [
            python, "-m", "tx.tinker.api", "--base-model", model, "--port", str(port), "--host",
            "127.0.0.1",
            "--checkpoints-base", store, "--database-url", f"sqlite:///{store}/tinker.db",
            "--backend-config", '{"max_lora_adapters": 3, "max_lora_rank": 32}',
        ]  # fmt: skip
        env = {"JAX_PLATFORMS": "cpu", "PATH": f"{store}:{os.environ['PATH']}"}
        return measure_process(command, env, f"http://127.0.0.1:{port}", python, model)


def measure_process(
    command: list[str], env: dict[str, str], url: str, python: str, model: str
) -> Rates:
    """Start a server, run the work against it, and return the speeds and the peak memory."""
    started = time.perf_counter()
    with run_server(command, env) as process:
        wait_until_ready(url, process)
        start = time.perf_counter() - started
        rates = run_work(python, "server", url, TOKEN, model)
        processes = [
            psutil.Process(process.pid),
            *psutil.Process(process.pid).children(recursive=True),
        ]
        peak = sum(read_peak_bytes(process.pid) for process in processes)
    return {**rates, "start to first answer": start, "peak memory": peak / 1e9}


@contextlib.contextmanager
def run_server(command: list[str], env: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    with tempfile.NamedTemporaryFile(prefix="bench-", suffix=".log", delete=False) as log:
        process = subprocess.Popen(
            command,
            env={**os.environ, "HF_HUB_OFFLINE": "1", **env},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def wait_until_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + 300
    while time.monotonic() < until:
        if process.poll() is not None:
            raise SystemExit(f"{process.args} has ended with {process.returncode}")
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{url}/api/v1/healthz", headers={"X-API-Key": TOKEN}).status_code == 200:
                return
        time.sleep(0.05)
    raise SystemExit(f"{process.args} is not ready after 300 s")


def read_peak_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/status").read_text().split("VmHWM:")[1].split()[0]) * 1024


if __name__ == "__main__":
    main()
