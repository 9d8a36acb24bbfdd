"""Measure the whole chain to a reward of 0.85, beside a loop by hand in torch and GRPO of TRL.

All have the same model, adapter, batch and learning rate.

python bench/time_to_reward.py [--seeds [0 1 2]] [--trl PYTHON] [--large-steps 12]

A second table has the seconds of a step of a Qwen3 of 48 million parameters with random weights, on
the same prompts and as many answers of as many tokens.

Ours is a real run: Prefect, four processes, checkpoints. `--trl` is the interpreter of an
environment with TRL (`pip install trl==1.16.0 peft` beside a PyTorch for the CPU). Seconds from the
first batch: ours from its arrival at the trainer, theirs from the first question; with start-up,
from the command to the reward.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from engine import medium
from table import show

from lachesis.cli.commands import watch
from lachesis.config.launch_spec import LaunchSpec
from lachesis.environment_catalog import lookup
from lachesis.operations.launches import start_run
from lachesis.operations.runs import read_metrics
from lachesis.prefect_client import background_serve, stop
from lachesis.runs.store import RunStore
from lachesis.tiny_model import build

GOAL = 0.85
ROOT = Path(__file__).resolve().parents[1]
WORK = str(Path(__file__).parent / "programs" / "reinforce_loop.py")
EDITS = (
    ("total_steps", 200),
    ("use_wandb", False),
    ("final_evaluation", False),
    ("save_checkpoint_interval", 50),
)
Times = tuple[float, float, int]
"""Seconds of training, seconds with start-up, steps."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--trl", metavar="PYTHON")
    parser.add_argument(
        "--large-steps", type=int, default=12, help="steps of the large model; 0 for no such table"
    )
    args = parser.parse_args()
    model = str(build.ensure_tiny_model(build.TinyModelRecipe()))
    if args.seeds:
        compare_learning(model, args.seeds, args.trl)
    if args.large_steps:
        with background_serve.LauncherProcess():
            compare_steps(str(medium()), args.large_steps, args.trl)


def compare_learning(model: str, seeds: list[int], trl: str | None) -> None:
    """Print the seconds to the reward, of each seed as soon as it is there."""
    programs = {"torch by hand": (sys.executable, "torch")}
    if trl:
        programs["TRL"] = (trl, "trl")
    times_by_name = {
        name: [print_times(name, run_reinforce(*program, model, seed)) for seed in seeds]
        for name, program in programs.items()
    }
    with background_serve.LauncherProcess():
        for name, batches in (("Lachesis, two batches may wait", 2), ("Lachesis", 1)):
            edit = ("max_batches_offpolicy", batches)
            times_by_name[name] = [
                print_times(name, measure_lachesis(seed, edit)) for seed in seeds
            ]
    mine = compute_medians(times_by_name["Lachesis"])
    rows: list[list[object]] = []
    for name, times in times_by_name.items():
        own = compute_medians(times)
        rows.append(
            [
                name,
                *(f"{seconds:.1f}" for seconds in own),
                *(f"{mine[at] / own[at]:.2f}" for at in (0, 1)),
            ]
        )
    columns = [
        "to reward 0.85, medians",
        "s",
        "s with start-up",
        "steps",
        "Lachesis / this one",
        "with start-up",
    ]
    show(
        f"chain, seeds {seeds} (targets: at most 4 times the loop by hand, at most TRL)",
        columns,
        rows,
    )
    outside = statistics.median(share for seed in seeds for share in measure_own_shares(seed))
    print(f"outside Tinker calls and waits: {100 * outside:.1f} % of a step (target: 5)")


def compare_steps(model: str, num_steps: int, trl: str | None) -> None:
    """Print the seconds of a step of a larger model, without the first one."""
    programs = {"torch by hand": (sys.executable, "torch")}
    if trl:
        programs["TRL"] = (trl, "trl")
    seconds = {
        name: run_reinforce(python, kind, model, 0, num_steps)[0] / (num_steps - 1)
        for name, (python, kind) in programs.items()
    }
    with tempfile.TemporaryDirectory() as folder:
        environment = lookup.register_environment(str(write_coin_environment(Path(folder))))
        for name, batches in (("Lachesis, two batches may wait", 2), ("Lachesis", 1)):
            seconds[name] = measure_step_s(environment, model, num_steps, batches)
    own = seconds["Lachesis"]
    rows = [[name, f"{value:.2f}", f"{own / value:.2f}"] for name, value in seconds.items()]
    columns = [f"48 million parameters, {num_steps} steps", "s per step", "Lachesis / this one"]
    show("chain, a larger model (target: at most TRL)", columns, rows)


def write_coin_environment(folder: Path) -> Path:
    """Write an environment like `arithmetic` in which a coin decides whether an answer is right.

    A model with random weights is never right about a sum, and a group of equal scores is not
    trained on; the loops without Lachesis compute their update all the same.
    """
    source = (ROOT / "environments" / "arithmetic.py").read_text()
    for old, new in (
        ('name = "arithmetic"', 'name = "coin"'),
        ('answer.strip() == item["answer"]', "random.random() < 0.5"),
    ):
        if source.count(old) != 1:
            raise SystemExit(f"environments/arithmetic.py has changed: {old}")
        source = source.replace(old, new)
    file = folder / "coin.py"
    file.write_text(source)
    return file


def measure_step_s(environment: str, model: str, num_steps: int, batches: int) -> float:
    """Return the mean seconds of a step of a run, without the first one."""
    store = RunStore()
    edits = (*EDITS[1:], ("total_steps", num_steps), ("max_batches_offpolicy", batches))
    # Evaluations would be counted as training.
    edits = (*edits, ("steps_per_eval", 0), ("max_token_length", 128))
    spec = LaunchSpec(environment=environment, settings=dict(edits), model=model, seed=0)
    record = start_run(store, spec)
    record = watch.watch_until_end(store, record.run_id, quiet=True)
    stop.wait_until_gone(store, record)
    steps = read_metrics(store, record.run_id)
    if any(step["batch/zero_signal_groups"] for step in steps):
        raise SystemExit("groups were not trained on, so a step's time says nothing")
    return float(steps[-1]["time"] - steps[0]["time"]) / (num_steps - 1)


RUNS: dict[int, str] = {}


def measure_lachesis(seed: int, *edits: tuple[str, object]) -> Times:
    store = RunStore()
    began = time.time()
    settings = dict((*EDITS, *edits))
    record = start_run(store, LaunchSpec(environment="arithmetic", settings=settings, seed=seed))
    RUNS[seed] = record.run_id
    record = watch.watch_until_end(store, record.run_id, quiet=True)
    stop.wait_until_gone(store, record)
    steps = read_metrics(store, record.run_id)
    first = steps[0]["time"] - steps[0]["time/train"]
    reached = next(step for step in steps if step["reward/mean"] >= GOAL)
    end = reached["time"]
    return end - first, end - began, int(reached["step"])


def measure_own_shares(seed: int) -> list[float]:
    """Return the share of each step that the trainer spent on its own work.

    It is the time that is neither waiting for rollouts nor for the server, over the step's time.
    """
    waits = (
        "time/rollouts",
        "time/forward_backward",
        "time/optim_step",
        "time/publish",
        "time/checkpoint",
    )
    steps = read_metrics(RunStore(), RUNS[seed])
    return [1 - sum(step.get(name) or 0.0 for name in waits) / step["time/step"] for step in steps]


def run_reinforce(
    python: str, kind: str, model: str, seed: int, num_steps: int | None = None
) -> Times:
    """Run a loop without Lachesis, to the reward or for a number of steps."""
    env = {**os.environ, "HF_HUB_OFFLINE": "1"}
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [python, WORK, kind, model, str(seed), *([str(num_steps)] if num_steps else [])],
            env=env,
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
        )
    whole = time.perf_counter() - started
    if done.returncode != 0:
        raise SystemExit(f"{kind} failed: {done.stderr[-3000:]}")
    result = json.loads(done.stdout.splitlines()[-1])
    return result["seconds"], whole, result["steps"]


def print_times(name: str, times: Times) -> Times:
    """Print the times of one seed, and return them."""
    print(f"{name}: {times[0]:.1f} s, {times[1]:.1f} with start-up, {times[2]} steps", flush=True)
    return times


def compute_medians(times: list[Times]) -> Times:
    return tuple(statistics.median(column) for column in zip(*times, strict=True))  # type: ignore[return-value]


if __name__ == "__main__":
    main()
