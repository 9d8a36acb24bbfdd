"""An error in a step loses no step and counts none twice: a checkpoint holds as many updates as its
name says.
"""

import asyncio
import logging
import random
import threading

import pytest
from transformers import AutoTokenizer

from lachesis.checkpoints.manifests import Checkpoints
from lachesis.config import run_config as run_config
from lachesis.config.run_config import RunConfig
from lachesis.runs.folder import RunDir
from lachesis.runs.metrics import MetricsFile
from lachesis.trainer import loop
from lachesis.trainer.checkpoint_saving import CheckpointManager
from lachesis.trainer.rollout_client import RolloutClient, ScoredGroup
from lachesis.trainer.trackers import Trackers
from lachesis.trainer.trained_model import Policy
from lachesis.trainer.trainer_state import TrainerState

STEPS, FAILING, INTERVAL, GROUPS = 7, 6, 4, 2
PROMPT, ANSWER = 4, 6


class Replayed(RolloutClient):
    """Groups that nobody samples: the n-th one is always the same, so that two runs can be compared
    number by number.
    """

    def __init__(self, received: int) -> None:
        super().__init__("http://127.0.0.1:9")
        self.received = received

    async def next_batch(self, step: int) -> list[ScoredGroup]:
        first, self.received = self.received, self.received + GROUPS
        return [_group(first + number) for number in range(GROUPS)]

    async def read_queue_counts(self) -> dict[str, float]:
        return {}


def _group(number):
    chance = random.Random(number)
    tokens_G = [[chance.randrange(10, 40) for _ in range(PROMPT + ANSWER)] for _ in range(4)]
    return {
        "tokens": tokens_G,
        "masks": [[-100] * PROMPT + tokens[PROMPT:] for tokens in tokens_G],
        "inference_logprobs": [
            [1.0] * PROMPT + [-chance.random() - 2 for _ in range(ANSWER)] for _ in tokens_G
        ],
        "scores": [0.0, 1.0, 0.0, 1.0],
    }


class Run:
    """The real loop on a real engine, one attempt after the other."""

    def __init__(self, path, engine):
        self.folder, self.engine = RunDir(path.parent, path.name), engine
        self.folder.path.mkdir(parents=True)
        self.checkpoints = Checkpoints(self.folder.checkpoints)
        edits = {
            "env": {"group_size": 4, "batch_size": 4 * GROUPS, "total_steps": STEPS},
            "tinker": {
                "use_wandb": False,
                "save_checkpoint_interval": INTERVAL,
                "learning_rate": 1e-3,
            },
        }
        self.config: RunConfig = run_config.resolve_run_config(
            "replay", "embedded", edits, model=engine.model
        )
        self.tokenizer = AutoTokenizer.from_pretrained(engine.model)

    async def attempt(self):
        """Train from the newest checkpoint to the last step."""
        newest = self.checkpoints.find_resumable()
        policy = await Policy.create(self.config, resume_from=newest.state if newest else None)
        await policy.publish()
        keeper = CheckpointManager(
            policy, self.checkpoints, num_to_keep=2, resume_checkpoint=newest
        )
        trainer = loop.Trainer(
            self.config,
            policy,
            Replayed(keeper.groups),
            checkpoint_manager=keeper,
            state=TrainerState(step=keeper.step),
            run_dir=self.folder,
            trackers=Trackers([]),
            tokenizer=self.tokenizer,
        )
        try:
            await trainer.run(asyncio.Event())
        finally:
            await policy.close("success")

    def newest(self):
        manifest = self.checkpoints.find_newest()
        assert manifest is not None
        return manifest

    def weights(self):
        place = self.newest().sampler_weights.removeprefix("tinker://")
        return (self.engine.store / place / "adapter_model.safetensors").read_bytes()

    def steps(self):
        return MetricsFile(self.folder.metrics).read()


@pytest.fixture
def make_run(tmp_path, engine, monkeypatch):
    monkeypatch.setenv("TINKER_BASE_URL", engine.url)
    monkeypatch.setenv("TINKER_API_KEY", engine.token)
    return lambda name: Run(tmp_path / name, engine)


def fail_once(monkeypatch, owner, name):
    """Let the call in step FAILING raise an error."""
    original, calls = getattr(owner, name), []

    def failing(*args, **kwargs):
        calls.append(1)
        if len(calls) == FAILING:
            raise RuntimeError("injected")
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, failing)


@pytest.mark.parametrize(
    ("owner", "name", "saved"),
    [
        (loop.Trainer, "_apply_kl_penalty", FAILING - 1),  # before the update
        (loop, "compute_rollout_metrics", FAILING),  # while the server makes the update
        (loop.WeightSyncCheck, "finish_change_measurement", FAILING),  # after it
        (loop.RolloutWriter, "add", FAILING),  # after all of it, before the line of the step
    ],
)
async def test_a_run_that_fails_in_a_step_and_is_resumed_equals_one_that_did_not(
    make_run, monkeypatch, owner, name, saved
):
    whole, failed = make_run("whole"), make_run("failed")
    await whole.attempt()
    with monkeypatch.context() as injected:
        fail_once(injected, owner, name)
        with pytest.raises(RuntimeError, match="injected"):
            await failed.attempt()
    assert (failed.newest().step, failed.newest().groups) == (saved, GROUPS * saved)
    assert len(failed.steps()) == saved, "each step that was made has its line"
    await failed.attempt()
    assert [step["step"] for step in failed.steps()] == list(range(1, STEPS + 1))
    for mine, theirs in zip(failed.steps(), whole.steps(), strict=True):
        assert mine["reward/mean"] == theirs["reward/mean"]
        assert mine.get("train/loss", theirs["train/loss"]) == theirs["train/loss"], mine["step"]
    assert len({step["train/loss"] for step in whole.steps()}) == STEPS
    assert failed.steps()[0]["weights/sampler_gap"] < 1e-5
    assert failed.weights() == whole.weights()


async def test_an_error_in_the_middle_of_an_update_saves_nothing(make_run, monkeypatch, caplog):
    """The server may or may not have changed the weights, so the checkpoint before counts."""
    run = make_run("run")
    fail_once(monkeypatch, Policy, "_queue_optim_step")
    with pytest.raises(RuntimeError, match="injected"):
        await run.attempt()
    assert run.newest().step == INTERVAL
    assert (
        "no checkpoint after an error in the middle of an update; the last one is of step 4"
        in caplog.text
    )


async def test_a_line_that_cannot_be_written_costs_no_checkpoint(make_run, monkeypatch, caplog):
    caplog.set_level(logging.WARNING)
    run = make_run("run")
    append, calls = MetricsFile.append, []

    def full(self, step, metrics):
        calls.append(step)
        if step >= FAILING:
            raise RuntimeError("injected")
        append(self, step, metrics)

    monkeypatch.setattr(MetricsFile, "append", full)
    with pytest.raises(RuntimeError, match="injected"):
        await run.attempt()
    assert calls[-2:] == [FAILING, FAILING], "it was tried again"
    assert run.newest().step == FAILING
    assert "the metrics of step 6 were not written" in caplog.text


async def test_a_run_that_is_ended_while_the_server_says_nothing_ends_at_once(
    make_run, monkeypatch
):
    """An account without money is such a server; the refusal may come at any moment of the step."""
    computes, goes_on = asyncio.Event(), threading.Event()
    event_loop = asyncio.get_running_loop()

    async def never(*_):
        await asyncio.Event().wait()
        return {}

    def compute(*_):
        event_loop.call_soon_threadsafe(computes.set)
        goes_on.wait(30)
        return {}

    monkeypatch.setattr(Policy, "train", never)
    monkeypatch.setattr(loop, "compute_rollout_metrics", compute)
    attempt = asyncio.create_task(make_run("run").attempt())
    await asyncio.wait_for(computes.wait(), 60)
    attempt.cancel()
    goes_on.set()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(attempt, 60)
