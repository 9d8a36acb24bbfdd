"""Measure what it costs to keep every rollout: the time of a step with and without.

python bench/rollout_storage.py [--pairs 4] [--steps 150]

Runs with `rollouts.max_gb` 1 and 0 take turns on the tiny model, which has the shortest steps and
so the largest share. The first tenth of each run is left out. On a machine that others use, two
equal runs differ by more than the target of one percent, so the processor time that the writer of
such a run needs is measured by itself too, and divided by the time of a step.
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from table import show
from transformers import AutoTokenizer

from lachesis.cli.commands import watch
from lachesis.config.launch_spec import LaunchSpec
from lachesis.inference_server.token_usage import Usage
from lachesis.operations.launches import start_run
from lachesis.operations.runs import read_metrics
from lachesis.prefect_client import background_serve, stop
from lachesis.rollouts import writer as rollout_writer
from lachesis.rollouts.columns import MISSING_LOGPROB
from lachesis.rollouts.parquet_files import RolloutFolder
from lachesis.rollouts.search import RolloutQuery, find_rollouts
from lachesis.rollouts.writer import RolloutWriter, StepRollouts
from lachesis.runs.store import RunStore
from lachesis.tiny_model import build
from lachesis.trainer.batch.group_to_datums import IGNORE_INDEX, BatchSettings, to_batch

NUM_GROUPS, GROUP_SIZE = 8, 16
# A file is written every five seconds, which is about so many steps of the tiny model.
STEPS_OF_A_FILE = 20
EDITS = (("use_wandb", False), ("final_evaluation", False), ("save_checkpoint_interval", 1000))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=4)
    parser.add_argument("--steps", type=int, default=150)
    args = parser.parse_args()
    model_folder = build.ensure_tiny_model(build.TinyModelRecipe())
    means: dict[float, list[float]] = {1.0: [], 0.0: []}
    with background_serve.LauncherProcess():
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
    each = ", ".join(f"{ratio:.3f}" for ratio in ratios)
    print(f"kept / not kept: mean {statistics.mean(ratios):.3f}, of each pair {each}")
    writer_s = measure_writer_s(model_folder, args.steps)
    share = writer_s / statistics.mean(means[0.0])
    print(
        f"the writer alone: {writer_s * 1e3:.2f} ms of processor time per step, {share:.2%} of it"
    )


def measure_writer_s(model_folder: Path, num_steps: int) -> float:
    """Return the processor seconds per step that the writer needs, its merging of files included.

    The first round, which loads libraries, is left out.
    """
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    rollout_writer.MAX_WAITING_ROLLOUTS = STEPS_OF_A_FILE * NUM_GROUPS * GROUP_SIZE
    seconds = []
    for _ in range(3):
        steps = [make_step(tokenizer, step + 1) for step in range(num_steps)]
        with tempfile.TemporaryDirectory() as folder:
            writer = RolloutWriter(
                RolloutFolder(Path(folder), 10**9), tokenizer, Usage(), environment="arithmetic"
            )
            began = time.process_time()
            writer.start(0)
            for step in steps:
                writer.add(step)
                time.sleep(0.01)  # As in a run, steps come one by one.
            writer.close()
            seconds.append((time.process_time() - began) / num_steps)
    return statistics.mean(seconds[1:])


def make_step(tokenizer: Any, step: int) -> StepRollouts:
    """Return a step of the environment `arithmetic`: sums as prompts, a number as each answer."""
    numbers = random.Random(step)
    groups = []
    for _ in range(NUM_GROUPS):
        prompt = tokenizer.encode(f"{numbers.randrange(10)}+{numbers.randrange(10)}=")
        answers = [
            [*tokenizer.encode(str(numbers.randrange(19))), tokenizer.eos_token_id]
            for _ in range(GROUP_SIZE)
        ]
        groups.append(
            {
                "tokens": [np.array(prompt + answer) for answer in answers],
                "masks": [np.array([IGNORE_INDEX] * len(prompt) + answer) for answer in answers],
                "scores": [float(numbers.random() < 0.5) for _ in answers],
                "inference_logprobs": [
                    np.array([MISSING_LOGPROB] * len(prompt) + [-0.5] * len(answer))
                    for answer in answers
                ],
                "group_overrides": {"item": json.dumps({"sum": tokenizer.decode(prompt)})},
            }
        )
    return StepRollouts(step, groups, to_batch(groups, BatchSettings(64, tokenizer.eos_token_id)))


def measure_step_s(steps: int, seed: int, max_gb: float) -> float:
    """Return the mean seconds of a step, without the first tenth of the run."""
    store = RunStore()
    settings = {**dict(EDITS), "rollouts.max_gb": max_gb}
    spec = LaunchSpec(environment="arithmetic", steps=steps, settings=settings, seed=seed)
    record = start_run(store, spec)
    record = watch.watch_until_end(store, record.run_id, quiet=True)
    stop.wait_until_gone(store, record)
    metrics = read_metrics(store, record.run_id)
    show_size(store, record.run_id)
    first, last = metrics[steps // 10], metrics[-1]
    step_s = float((last["time"] - first["time"]) / (last["step"] - first["step"]))
    print(f"seed {seed}, rollouts.max_gb {max_gb}: {step_s:.4f} s per step", flush=True)
    return step_s


def show_size(store: RunStore, run_id: str) -> None:
    """Print how many rollouts a run has kept, their size, and how long the worst take to find."""
    folder = store.dir(run_id).rollouts
    size = sum(file.stat().st_size for file in folder.glob("*.parquet"))
    began = time.perf_counter()
    found = find_rollouts(folder, RolloutQuery(order="worst"))
    seconds = time.perf_counter() - began
    print(f"{run_id}: {found.num_matching} rollouts, {size / 1e6:.2f} MB, found in {seconds:.2f} s")


if __name__ == "__main__":
    main()
