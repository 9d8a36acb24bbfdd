"""Measure what environments cost: discovery, the sandbox, and the time added to the engine's.

    python bench/environment_cost.py

Ratios in one run on this machine: discovery beside reading the same files alone, the sandbox beside
the same program without one, and rollouts through a TaskEnv beside the same requests sent by hand.
"""

import asyncio
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
from engine import medium
from table import show

from lachesis.base.json_text import read_json_lines
from lachesis.config.launch_spec import LaunchSpec, TestSpec
from lachesis.config.run_config import RunConfig
from lachesis.environment_catalog import lookup, scan
from lachesis.environment_catalog.new_environment import TEMPLATE
from lachesis.environment_check.stages import serve_base_model
from lachesis.environment_toolkit.sandbox import Sandbox
from lachesis.operations.launches import build_tiny_model, resolve_launch
from lachesis.runs.environment_counters import read_counts
from lachesis.runs.store import RunStore
from lachesis.supervision.readiness import wait_until_ended
from lachesis.supervision.running_services import ServiceGroup
from lachesis.supervision.services.inference_test import (
    make_inference_test_spec,
    make_process_config,
)
from lachesis.tiny_model import teach

FILES, TOUCHED = 500, 10
PROGRAM = "print(sum(range(1000)))"
RUNS = 24
GROUPS, GROUP, WARM = 60, 16, 10


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        measure_discovery(Path(folder))
    asyncio.run(measure_sandbox())
    for name, model in (
        ("arithmetic", None),
        ("reverse_text", build_taught_model("reverse_text")),
        ("reverse_text", medium()),
    ):
        with tempfile.TemporaryDirectory() as folder:
            measure_process(name, model, Path(folder))


def build_taught_model(name: str) -> Path:
    """Build a model as `lachesis model build --for` does, whose answers are as long as those of the
    task.
    """
    return teach.ensure_environment_model((lookup.find_environment(name), {}))


def measure_discovery(folder: Path) -> None:
    """Environments as `lachesis env new` makes them; the first time, again, and after some of them
    were changed.
    """
    for number in range(FILES):
        text = (
            TEMPLATE.read_text().replace("CLASS", f"Env{number}").replace("NAME", f"env_{number}")
        )
        (folder / f"env_{number}.py").write_text(text)

    def look() -> None:
        assert len(scan.scan_environments([folder]).environments) == FILES

    def read() -> None:
        for file in folder.glob("*.py"):
            file.read_text()

    first, again, alone = measure_s(look), measure_s(look), measure_s(read)
    for number in range(TOUCHED):
        (folder / f"env_{number}.py").touch()
    changed = measure_s(look)
    rows: list[list[object]] = [
        ["the first time", f"{first:.3f}", f"{first / alone:.1f}"],
        ["again, in the same process", f"{again:.3f}", f"{again / alone:.1f}"],
        [f"after {TOUCHED} were changed", f"{changed:.3f}", f"{changed / alone:.1f}"],
    ]
    show(
        f"finding {FILES} environments (target: 0.5 s)", ["", "s", "times reading the files"], rows
    )


def measure_s(call: Callable[[], Any]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


async def measure_sandbox() -> None:
    """Measure programs one after the other, and as many at once as there are cores, beside the same
    programs in a bare child.
    """
    jailed = Sandbox()

    async def bare() -> None:
        child = await asyncio.create_subprocess_exec(
            sys.executable,
            "-I",
            "-S",
            "-B",
            "-c",
            PROGRAM,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        await child.communicate()

    async def confined() -> None:
        assert (await jailed.run(PROGRAM)).how == "ended"

    rows: list[list[object]] = []
    times = {
        name: await time_sequential(call) for name, call in (("confined", confined), ("bare", bare))
    }
    overhead = 1000 * (times["confined"] - times["bare"])
    whole = 1000 * times["confined"]
    rows.append(
        [
            "one, ms",
            f"{whole:.0f}",
            f"{times['confined'] / times['bare']:.2f}",
            f"{overhead:.0f} ms more",
        ]
    )
    rate = {
        name: await time_concurrent(call) for name, call in (("confined", confined), ("bare", bare))
    }
    rows.append(
        ["a second", f"{rate['confined']:.0f}", f"{rate['bare'] / rate['confined']:.2f}", ""]
    )
    columns = ["", "sandbox", "times a bare child", "overhead"]
    show("a program in the sandbox (targets: 80 ms overhead, 8 a second)", columns, rows)


async def time_sequential(call: Callable[[], Awaitable[None]]) -> float:
    durations = []
    for _ in range(RUNS):
        started = time.perf_counter()
        await call()
        durations.append(time.perf_counter() - started)
    return statistics.median(durations)


async def time_concurrent(call: Callable[[], Awaitable[None]]) -> float:
    started = time.perf_counter()
    await asyncio.gather(*(call() for _ in range(2 * RUNS)))
    return 2 * RUNS / (time.perf_counter() - started)


def measure_process(name: str, model: Path | None, folder: Path) -> None:
    """Groups that an environment's process makes one after the other, beside the same requests sent
    to the same server by hand, one after the other: what is more is tokenising, scoring and
    Atropos.
    """
    spec = LaunchSpec(environment=name, model=str(model) if model else None)
    resolved = resolve_launch(RunStore(), spec)
    environment, config = resolved.environment, resolved.config
    build_tiny_model(RunStore(), config, lambda done, total: None)
    output = folder / "groups.jsonl"
    test_spec = TestSpec(environment=name, steps=GROUPS, group_size=GROUP)
    with ServiceGroup() as group:
        plan = serve_base_model(group, config, config.openai.model_name, folder / "server")
        content = make_process_config(
            plan.config, test_spec, output, plan.config.openai.model_dump(mode="json"), "bench"
        )
        places = {
            "output": str(output),
            "counters": str(folder / "counters.json"),
            "samples": str(folder / "samples.jsonl"),
        }
        service, files = make_inference_test_spec(
            environment.file_path,
            content,
            output,
            {**places, "wandb_run": "bench"},
            client_env=plan.client_env,
        )
        for path, text in files.items():
            path.write_text(text)
        group.start(service)
        wait_until_ended(group, service, needs=[])
        lines = read_json_lines(output)
        by_hand = send_by_hand(
            lines, config, plan.trainer_url, plan.client_env["LACHESIS_INFERENCE_TOKEN"]
        )
    counts = read_counts(folder / "counters.json") or {}
    theirs = sum(group["seconds"] for group in counts["per_group"][WARM:]) / (GROUPS - WARM)
    rows: list[list[object]] = [
        ["the environment's process", f"{1000 * theirs:.0f}", f"{theirs / by_hand:.2f}"],
        ["the same requests by hand", f"{1000 * by_hand:.0f}", "1.00"],
    ]
    size = "48 million" if model and model.name == medium().name else "100,000"
    show(
        f"{name}, {size} parameters: a group of {GROUP} answers (target: 1.10)",
        ["", "ms", "times by hand"],
        rows,
    )


def send_by_hand(lines: list[dict[str, Any]], config: RunConfig, url: str, token: str) -> float:
    """Seconds per group, after the first ones."""
    took, most = [], (config.env.model_extra or {})["max_answer_tokens"]
    with httpx.Client(
        timeout=120, trust_env=False, headers={"Authorization": f"Bearer {token}"}
    ) as client:
        for line in lines:
            masks = line["masks"][0]
            prompt = line["tokens"][0][: next(at for at, mask in enumerate(masks) if mask != -100)]
            body = {
                "prompt": {"prompt_token_ids": prompt},
                "logprobs": 0,
                "n": GROUP,
                "max_tokens": min(most, config.env.max_token_length - len(prompt) - 1),
                "temperature": 1.0,
            }
            started = time.perf_counter()
            client.post(f"{url}/generate", json=body).raise_for_status().json()
            took.append(time.perf_counter() - started)
    return statistics.fmean(took[WARM:])


if __name__ == "__main__":
    main()
