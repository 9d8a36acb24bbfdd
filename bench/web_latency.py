"""Measure the pages: how long each takes and how large it is, for 1, 100 and 1,000 recorded runs.

    python bench/web_latency.py [--runs 1,100,1000] [--steps 2500]

Runs of 2,500 steps with some sixty metrics are written to a home of their own. A real server is
asked for each page; `first` is the first answer, a second after its start, `again` the best of
five. What ten
open pages cost a run is measured by the processor time of the server while steps are written, and
what lists of 2,000 runs cost by that of the command and of the server.
"""

import argparse
import contextlib
import json
import math
import os
import random
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from unittest import mock

import httpx
import psutil

from lachesis.config.launch_spec import LaunchSpec
from lachesis.config.run_config import resolve_run_config
from lachesis.runs.record import RunRecord
from lachesis.runs.store import RunStore
from lachesis.supervision.services.ports import reserve_free_ports
from lachesis.web.sign_in import make_sign_in_link

# What the answers may take, in seconds, and the share of a step that ten pages may cost.
TARGETS_S = {"list": 0.3, "run": 0.5, "curves": 0.5, "compare of 8": 1.0}
TARGET_SHARE = 0.01
NUM_LISTED_RUNS, TARGET_LIST_S = 2000, 0.6
TOKEN = "a token of this home alone"
NUM_PAGES, STEP_S, NUM_LIVE_STEPS = 10, 0.3, 60
# Seconds between two questions of an open page.
POLL_S = 2.0
NAMES = [
    "reward/mean", "reward/std", "train/percent_correct", "batch/zero_signal_share", "train/loss",
    "entropy/sampling", "entropy/training", "length/mean", "length/max", "optim/grad_norm",
    "logprobs/gap", "kl/sampling_train", "staleness/mean", "time/rollouts", "time/train",
    "tokens_per_second/sampled", "rollouts/invalid", "rollouts/raised", "weights/change",
]  # fmt: skip
FILLERS = [f"other/metric_{number}" for number in range(45)]


def make_lines(num_steps: int, seed: int) -> list[str]:
    """Return the metrics of a run that learns, one JSON line per step."""
    draw, lines = random.Random(seed), []
    for step in range(1, num_steps + 1):
        reward = 1 - 0.9 * math.exp(-step / 600) + draw.gauss(0, 0.03)
        line = {"step": step, "time": 1.7e9 + step, "reward/mean": reward, "time/step": 0.3}
        line |= {name: draw.random() for name in (*NAMES[1:], *FILLERS)}
        line |= {f"tokens/{kind}_total": step * 1000 for kind in ("prefill", "sampled", "trained")}
        if step % 100 == 0:
            line |= {"eval/step": step, "eval/percent_correct": min(1, reward), "eval/items": 20}
        lines.append(json.dumps(line) + "\n")
    return lines


@mock.patch("os.fsync", return_value=None)  # A disk may take seconds for a hundred files.
def fill_home(home: Path, num_runs: int, num_steps: int, *_: object) -> list[str]:
    """Write recorded runs, and return their ids; most share their metrics as links of one file."""
    store, run_ids = RunStore(home), []
    shared = ["".join(make_lines(num_steps, seed)) for seed in range(8)]
    for number in range(num_runs):
        run_id = f"{number:08x}"
        edits = {"tinker": {"learning_rate": 10 ** -(3 + number % 3), "seed": number}}
        config = resolve_run_config("arithmetic", "embedded", edits, model="m")
        created = datetime.now(UTC) - timedelta(minutes=num_runs - number)
        record = RunRecord(
            run_id=run_id, spec=LaunchSpec(environment="arithmetic"),
            environment="arithmetic", environment_file="arithmetic.py",
            profile="embedded", base_model="m", total_steps=num_steps, seed=number,
            wandb_project="p", wandb_run_name="n", status="completed", batch_size=128,
            created_at=created.isoformat(), attempt_duration_s=800.0,
            health={"word": "healthy", "evidence": ["it rises"], "advice": [], "final": True},
        )  # fmt: skip
        run_dir = store.create(record, config.to_yaml())
        source = home / "shared" / f"{number % 8}.jsonl"
        if not source.exists():
            source.parent.mkdir(exist_ok=True)
            source.write_text(shared[number % 8])
        os.link(source, run_dir.metrics)
        run_ids.append(run_id)
    return run_ids


@contextlib.contextmanager
def serve(home: Path) -> Iterator[tuple[httpx.Client, psutil.Process]]:
    """A client of a real server of the pages, and its process."""
    port = reserve_free_ports(1)[0]
    env = {**os.environ, "LACHESIS_HOME": str(home), "LACHESIS_TOKEN": TOKEN}
    command = [sys.executable, "-m", "lachesis.cli.main", "ui", "--port", str(port)]
    server = subprocess.Popen(
        command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    address = f"http://127.0.0.1:{port}"
    with httpx.Client(base_url=address, timeout=120, trust_env=False) as client:
        while server.poll() is None:
            with contextlib.suppress(httpx.ConnectError):
                client.get(make_sign_in_link(address, TOKEN))
                break
            time.sleep(0.05)
        yield client, psutil.Process(server.pid)
    server.terminate()
    server.wait()


def measure(client: httpx.Client, path: str) -> tuple[float, float, int]:
    """Return the seconds of the first answer and of the best of five more, and its bytes."""
    seconds, num_bytes = [], 0
    for _ in range(6):
        started = time.perf_counter()
        with client.stream("GET", path) as answer:
            num_bytes = sum(len(chunk) for chunk in answer.iter_raw())
        assert answer.status_code == 200, path
        seconds.append(time.perf_counter() - started)
    return seconds[0], min(seconds[1:]), num_bytes


def measure_home(num_runs: int, num_steps: int) -> None:
    """Print a line per page for a home with so many runs."""
    with tempfile.TemporaryDirectory() as folder:
        run_ids = fill_home(Path(folder), num_runs, num_steps)
        metrics = ",".join(NAMES)
        pages = {"list": "/runs", "run": f"/runs/{run_ids[0]}"}
        pages["curves"] = f"/curves.json?runs={run_ids[0]}&metrics={metrics}"
        if num_runs >= 8:
            pages["compare of 8"] = f"/compare?runs={','.join(run_ids[:8])}"
        with serve(Path(folder)) as (client, _):
            # A person needs longer to open a link.
            time.sleep(1)
            for name, path in pages.items():
                first, again, num_bytes = measure(client, path)
                target = TARGETS_S[name]
                print(
                    f"{num_runs:>6,} {name:14} {first:8.3f} {again:8.3f} {target:8.1f} "
                    f"{num_bytes / 1000:8.0f}"
                )


def measure_list_cost() -> None:
    """Print the processor time of `lachesis runs` and of the page `/runs` in a large home."""
    with tempfile.TemporaryDirectory() as folder:
        fill_home(Path(folder), NUM_LISTED_RUNS, 50)
        env = {**os.environ, "LACHESIS_HOME": folder}
        costs = {}
        for name in ("lachesis runs, first", "lachesis runs"):
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            command = [sys.executable, "-m", "lachesis.cli.main", "runs"]
            subprocess.run(command, env=env, stdout=subprocess.DEVNULL, check=True)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            costs[name] = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        with serve(Path(folder)) as (client, process):
            time.sleep(5)  # The list is prepared when the pages start.
            for name in ("/runs, first", "/runs"):
                cpu_before = sum(process.cpu_times()[:2])
                client.get("/runs")
                costs[name] = sum(process.cpu_times()[:2]) - cpu_before
    for name, cost_s in costs.items():
        print(
            f"{name} at {NUM_LISTED_RUNS:,} runs: {cost_s:.2f} s of processor time "
            f"(target {TARGET_LIST_S:g})"
        )


def measure_live_cost() -> None:
    """Print what ten open pages of a living run cost, as a share of its step time."""
    with tempfile.TemporaryDirectory() as folder:
        (run_id,) = fill_home(Path(folder), 1, 300)
        store = RunStore(Path(folder))
        store.update(run_id, status="running", total_steps=1000)
        lines = make_lines(300 + NUM_LIVE_STEPS, 9)[300:]
        with serve(Path(folder)) as (client, process):
            curves = f"/curves.json?runs={run_id}&points=300&metrics={','.join(NAMES[:15])}"
            stop = threading.Event()
            readers = [
                threading.Thread(target=_keep_open, args=(client, f"/runs/{run_id}", curves, stop))
                for _ in range(NUM_PAGES)
            ]
            for reader in readers:
                reader.start()
            time.sleep(3)
            before = sum(process.cpu_times()[:2])
            for line in lines:
                with store.dir(run_id).metrics.open("a") as file:
                    file.write(line)
                time.sleep(STEP_S)
            used = sum(process.cpu_times()[:2]) - before
            stop.set()
        share = used / (NUM_LIVE_STEPS * STEP_S * (os.cpu_count() or 1))
        used_ms = 1000 * used / NUM_LIVE_STEPS
        print(
            f"{NUM_PAGES} open pages, a step every {STEP_S} s: {used_ms:.1f} ms of processor time "
            f"a step, {share:.2%} of the machine (target {TARGET_SHARE:.0%})"
        )


def _keep_open(client: httpx.Client, path: str, curves: str, stop: threading.Event) -> None:
    """Ask as an open page does: every two seconds, and for the curves where it has changed."""
    tag = ""
    while not stop.wait(POLL_S):
        answer = client.get(path, headers={"If-None-Match": tag, "HX-Request": "true"})
        if answer.status_code == 200:
            tag = answer.headers["etag"]
            client.get(curves)


def main() -> None:
    """Parse the arguments and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", default="1,100,1000")
    parser.add_argument("--steps", type=int, default=2500)
    args = parser.parse_args()
    print("  runs page            first s  again s target s    kB sent")
    for number in map(int, args.runs.split(",")):
        measure_home(number, args.steps)
    measure_list_cost()
    measure_live_cost()


if __name__ == "__main__":
    main()
