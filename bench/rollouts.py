"""Measure what it costs to keep every rollout: the time of a step with and without.

python bench/rollouts.py [--pairs 4] [--steps 150]

Runs with `rollouts.max_gb` 1 and 0 take turns on the tiny model, which has the shortest steps and
so the largest share. The first tenth of each run is left out. The target is one percent.
"""

from __future__ import annotations

import argparse
import statistics
import time

from table import show

from lachesis.cli import watch
from lachesis.orchestration import server, submit
from lachesis.runs.rollouts import RolloutQuery, find_rollouts
from lachesis.service import LachesisService, LaunchRequest
from lachesis.tiny_model import build

EDITS = (("use_wandb", False), ("final_evaluation", False), ("save_checkpoint_interval", 1000))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=4)
    parser.add_argument("--steps", type=int, default=150)
    args = parser.parse_args()
    build.ensure_tiny_model(build.TinyModelRecipe())
    means: dict[float, list[float]] = {1.0: [], 0.0: []}
    with server.LauncherProcess():
        for seed in range(args.pairs):
            order = (1.0, 0.0) if seed % 2 else (0.0, 1.0)
            for max_gb in order:
                means[max_gb].append(measure_step_s(args.steps, seed, max_gb))
    rows = [
        [
            name,
            *(f"{seconds:.4f}" for seconds in means[max_gb]),
            f"{statistics.mean(means[max_gb]):.4f}",
        ]
        for name, max_gb in (("kept", 1.0), ("not kept", 0.0))
    ]
    columns = ["rollouts", *(f"seed {seed}, s" for seed in range(args.pairs)), "mean"]
    ratios = [kept / without for kept, without in zip(means[1.0], means[0.0], strict=True)]
    show(f"mean seconds per step of {args.steps} steps", columns, rows)
    print(f"kept / not kept: mean {statistics.mean(ratios):.3f}, of each pair {ratios}")


def measure_step_s(steps: int, seed: int, max_gb: float) -> float:
    """Return the mean seconds of a step, without the first tenth of the run."""
    service = LachesisService()
    edits = (*EDITS, ("total_steps", steps), ("rollouts.max_gb", max_gb))
    record = service.start(LaunchRequest("arithmetic", edits=edits, seed=seed))
    record = watch.watch_until_end(service, record.run_id, quiet=True)
    submit.wait_until_gone(service.store, record)
    metrics = service.read_metrics(record.run_id)
    show_size(service, record.run_id)
    first = metrics[steps // 10]
    return float((metrics[-1]["time"] - first["time"]) / (metrics[-1]["step"] - first["step"]))


def show_size(service: LachesisService, run_id: str) -> None:
    """Print how many rollouts a run has kept, their size, and how long the worst take to find."""
    folder = service.store.dir(run_id).rollouts
    size = sum(file.stat().st_size for file in folder.glob("*.parquet"))
    began = time.perf_counter()
    found = find_rollouts(folder, RolloutQuery(order="worst"))
    seconds = time.perf_counter() - began
    print(f"{run_id}: {found.num_matching} rollouts, {size / 1e6:.2f} MB, found in {seconds:.2f} s")


if __name__ == "__main__":
    main()
