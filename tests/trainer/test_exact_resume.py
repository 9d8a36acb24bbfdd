"""A run that is interrupted and resumed is the run that was not: the same losses and the same
weights, bit for bit.
"""

import os
import random
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lachesis.checkpoints.manifests import Checkpoints
from lachesis.config import run_config as run_config
from lachesis.runs.metrics import MetricsFile
from lachesis.runs.store import RunStore
from lachesis.supervision.readiness import fetch_trainer_health, wait_until_healthy
from lachesis.supervision.running_services import ServiceGroup
from lachesis.supervision.services.plan import make_training_plan
from tests.harness.home import make_record
from tests.harness.waiting import wait_until

pytestmark = pytest.mark.timeout(600)
REPLAY = Path(__file__).resolve().parents[1] / "environments" / "replay.py"
STEPS, INTERVAL = 14, 4


class Run:
    """All services of a run without Prefect; the groups are always the same ones in the same
    order.
    """

    def __init__(self, home, model, *, steps=STEPS, env=None, tinker=None, environment=REPLAY):
        self.store = RunStore(home)
        edits = {
            "env": {
                "group_size": 4,
                "batch_size": 8,
                "total_steps": steps,
                "max_num_workers": 1,
                "ensure_scores_are_not_same": False,
                **(env or {}),
            },
            "tinker": {
                "use_wandb": False,
                "save_checkpoint_interval": INTERVAL,
                "learning_rate": 1e-3,
                "keep_checkpoints": 2,
                "final_evaluation": False,
                **(tinker or {}),
            },
        }
        config = run_config.resolve_run_config(environment.stem, "embedded", edits, model=model)
        record = make_record(
            run_id="00000001",
            environment=environment.stem,
            environment_file=str(environment),
            profile="embedded",
            base_model=model,
            total_steps=steps,
            seed=0,
            wandb_project="p",
            wandb_run_name="n",
        )
        self.folder = self.store.create(record, config.to_yaml())
        self.record, self.config = record, config

    def attempt(self, kill_at=None):
        """From the newest checkpoint to the last step, or until step `kill_at`, when the trainer is
        killed.
        """
        found = Checkpoints(self.folder.checkpoints).find_resumable()
        plan = make_training_plan(
            self.record,
            self.folder,
            self.config,
            received_groups=found.get_groups_by_environment([self.record.environment])
            if found
            else None,
        )
        plan.write_files()
        with ServiceGroup() as group:
            pids = {}
            for spec in plan.services:
                pids[spec.name] = group.start(spec)
                wait_until_healthy(group, spec)
            self.resumed = fetch_trainer_health(plan).get("resumed")
            wait_until(
                lambda: (
                    not group.is_running("trainer")
                    or (kill_at and self.steps()[-1:] and self.steps()[-1]["step"] >= kill_at)
                ),
                90,
                poll_s=0.01,
            )
            if kill_at:
                os.kill(pids["trainer"], signal.SIGKILL)
            group.wait("trainer", timeout_s=60)

    def steps(self):
        return MetricsFile(self.folder.metrics).read()

    def weights(self):
        newest = Checkpoints(self.folder.checkpoints).find_newest()
        assert newest is not None
        assert newest.is_final
        return (
            self.folder.engine
            / newest.sampler_weights.removeprefix("tinker://")
            / "adapter_model.safetensors"
        ).read_bytes()


@pytest.mark.long
def test_an_interrupted_run_equals_an_uninterrupted_one(tmp_path: Path, random_model: str) -> None:
    """By SIGKILL, which loses the steps since the last checkpoint: they are made again."""
    whole, parted = Run(tmp_path / "whole", random_model), Run(tmp_path / "parted", random_model)
    end = random.randint(INTERVAL + 1, 9)
    last = (end - 1) // INTERVAL * INTERVAL  # the line of a step is there before its checkpoint

    def interrupted():
        parted.attempt(kill_at=end)
        parted.attempt()

    with ThreadPoolExecutor(2) as both:
        for done in [both.submit(whole.attempt), both.submit(interrupted)]:
            done.result()
    resumed = parted.resumed
    assert (resumed["step"] % INTERVAL, resumed["groups"]) == (0, 2 * resumed["step"])
    assert resumed["step"] >= last > 0
    assert resumed["loss_change"] == 0.0
    assert [step["step"] for step in parted.steps()] == list(range(1, STEPS + 1))
    for key in ("train/loss", "reward/mean", "logprobs/mean_training"):
        assert [step[key] for step in parted.steps()] == [step[key] for step in whole.steps()], (
            key,
            end,
        )
    assert len({step["train/loss"] for step in whole.steps()}) == STEPS
    assert parted.weights() == whole.weights(), end
    kept = [one.step for one in Checkpoints(whole.folder.checkpoints).list_intact()]
    assert kept[-2:] == [12, STEPS]
    assert len(kept) <= 3
    assert len(list(whole.folder.engine.glob("*/weights/*"))) == len(kept), (
        "files of superseded checkpoints are gone"
    )
