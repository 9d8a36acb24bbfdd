"""Steps of the training loop with a real engine and a real rollout API, fed by hand."""

import asyncio
import contextlib
import logging
import threading

import httpx
import pytest
from transformers import AutoTokenizer

from lachesis.base.errors import BatchError
from lachesis.checkpoints.manifests import Checkpoints
from lachesis.config import run_config as run_config
from lachesis.rollouts.search import RolloutQuery, find_rollouts
from lachesis.runs.folder import RunDir
from lachesis.runs.metrics import MetricsFile
from lachesis.trainer import evaluation_schedule, loop, rollout_client, trained_model
from lachesis.trainer.checkpoint_saving import CheckpointManager
from lachesis.trainer.loop import Trainer
from lachesis.trainer.rollout_client import RolloutClient
from lachesis.trainer.trackers import Trackers
from lachesis.trainer.trained_model import Policy
from lachesis.trainer.trainer_state import TrainerState


def scored(*scores, **changes):
    count = len(scores)
    return {
        "tokens": [[2, 3, 4 + index, 5] for index in range(count)],
        "masks": [[-100, -100, 4 + index, 5] for index in range(count)],
        "inference_logprobs": [[1.0, 1.0, -5.0 - index, -5.5] for index in range(count)],
        "scores": list(scores),
        **changes,
    }


@pytest.fixture
async def trainer(engine, api, tmp_path, monkeypatch):
    """A factory of trainers whose steps take two groups of two rollouts."""
    monkeypatch.setenv("TINKER_BASE_URL", engine.url)
    monkeypatch.setenv("TINKER_API_KEY", engine.token)
    async with contextlib.AsyncExitStack() as stack:

        async def make(**tinker):
            env = {"batch_size": 4, "group_size": 2, "total_steps": 1, "rollout_server_url": api}
            edits = {"env": env, "tinker": {"use_wandb": False, "learning_rate": 1e-3, **tinker}}
            config = run_config.resolve_run_config(
                "arithmetic", "embedded", edits, model=engine.model
            )
            trained = await Policy.create(config, resume_from=None)
            stack.push_async_callback(trained.close, "success")
            await trained.publish()
            client = RolloutClient(api)
            stack.push_async_callback(client.close)
            await client.register(config, first_step=0, checkpoint_dir=tmp_path)
            keeper = CheckpointManager(
                trained,
                Checkpoints(tmp_path / "checkpoints"),
                num_to_keep=1,
                resume_checkpoint=None,
            )
            return Trainer(
                config,
                trained,
                client,
                checkpoint_manager=keeper,
                state=TrainerState(),
                run_dir=RunDir(tmp_path.parent, tmp_path.name),
                trackers=Trackers([]),
                tokenizer=AutoTokenizer.from_pretrained(engine.model),
            )

        yield make


async def play(trainer, *groups):
    """Send the groups, train on them, and return the line of the step."""
    async with httpx.AsyncClient(base_url=trainer.rollout_client.url) as client:
        for group in groups:
            assert (await client.post("/scored_data", json=group)).status_code == 200
    await asyncio.wait_for(trainer.run(asyncio.Event()), 60)
    return MetricsFile(trainer.run_dir.metrics).read()[-1]


NO_LOGPROB = {"inference_logprobs": [[1.0, 1.0, 1.0, -1.0]] * 2}
FOREIGN = {
    "tokens": [[2, 3, 999_999, 5]] * 2,
    "masks": [[-100, -100, 999_999, 5]] * 2,
    "inference_logprobs": None,
}


@pytest.mark.parametrize(
    ("bad", "reason"), [(NO_LOGPROB, "not usable"), (FOREIGN, "computed no log-probabilities")]
)
async def test_a_bad_group_costs_itself_and_is_named(trainer, caplog, bad, reason):
    caplog.set_level(logging.WARNING)
    line = await play(await trainer(), scored(1.0, 0.0), scored(1.0, 0.0, **bad))
    assert (line["batch/dropped_groups"], line["batch/groups"], line["batch/datums"]) == (1, 1, 2)
    assert [
        reason in message
        for message in caplog.messages
        if "is dropped from the batch of step 1" in message
    ] == [True]


async def test_a_batch_of_bad_groups_ends_the_run_with_the_first_reason(trainer):
    with pytest.raises(
        BatchError,
        match="none of the 2 groups of a batch can be trained on; group 0: rollout 0: 1 sampling",
    ):
        await play(await trainer(), scored(1.0, 0.0, **NO_LOGPROB), scored(1.0, 0.0, **NO_LOGPROB))


async def test_the_penalty_reaches_groups_of_equal_scores(trainer):
    """Near convergence there are no others."""
    line = await play(
        await trainer(kl_coefficient=0.5),
        scored(1.0, 1.0),
        scored(0.0, 0.0, inference_logprobs=None),
    )
    assert (
        line["batch/zero_signal_groups"],
        line["batch/datums"],
        line["batch/without_logprobs"],
    ) == (2, 4, 2)
    assert line["advantages/mean"] == pytest.approx(0.0, abs=1e-5)
    assert line["advantages/std"] > 0
    assert "kl/base" in line


async def test_a_batch_is_worked_on_beside_the_loop_that_answers_environments(trainer, monkeypatch):
    """A large batch takes seconds, in which requests for samples would wait."""
    threads: dict[str, set[int]] = {}

    def watch(module, name):
        function = getattr(module, name)

        def watched(*arguments):
            threads.setdefault(name, set()).add(threading.get_ident())
            return function(*arguments)

        monkeypatch.setattr(module, name, watched)

    work = {
        rollout_client: ["read_batch_json"],
        loop: ["to_batch", "compute_rollout_metrics"],
        trained_model: ["to_data", "to_prompts"],
    }
    for module, names in work.items():
        for name in names:
            watch(module, name)
    await play(await trainer(kl_coefficient=0.5), scored(1.0, 0.0), scored(1.0, 0.0))
    assert set(threads) == {name for names in work.values() for name in names}
    for name, seen in threads.items():
        assert threading.get_ident() not in seen, name


async def test_without_a_penalty_groups_of_equal_scores_teach_nothing(trainer):
    line = await play(await trainer(), scored(1.0, 1.0), scored(0.0, 0.0))
    assert (line["batch/zero_signal_groups"], line["batch/datums"]) == (2, 0)
    assert "kl/base" not in line


async def test_a_learning_rate_of_nothing_ends_no_run(trainer):
    """Nor does a first rollout of which one token alone can be predicted."""
    short = scored(
        1.0, 0.0, tokens=[[2, 3]] * 2, masks=[[-100, 3]] * 2, inference_logprobs=[[1.0, -5.0]] * 2
    )
    line = await play(await trainer(learning_rate=1e-12), short, scored(1.0, 0.0))
    assert line["batch/datums"] == 4


async def test_the_wait_for_an_evaluation_after_the_last_step_is_no_wait_for_a_checkpoint(
    trainer, monkeypatch
):
    """The monitor would take a long one for a server that does not save."""
    monkeypatch.setattr(evaluation_schedule, "HEARTBEAT_TIMEOUT_S", -1.0)
    trained = await trainer()

    class Watched(evaluation_schedule.EvaluationScheduler):
        async def wait_for_last_round(self, stop: asyncio.Event) -> None:
            assert self.step_under_way == 1
            self.waiting_for = trained.state.waiting_for
            await super().wait_for_last_round(stop)

    trained.state.evaluations = watched = Watched(every_steps=1)
    line = await play(trained, scored(1.0, 0.0), scored(1.0, 0.0))
    assert watched.waiting_for == "evaluation"
    assert line["eval/failed"] == 2, "nobody has begun those of steps 0 and 1"


async def test_every_rollout_is_kept_and_what_the_api_refused_too(trainer):
    trained = await trainer()
    async with httpx.AsyncClient(base_url=trained.rollout_client.url) as client:
        answer = await client.post("/scored_data", json=scored(1.0, 0.0, scores=[1.0]))
        assert answer.status_code == 422
    await play(trained, scored(1.0, 0.0), scored(1.0, 0.0, **NO_LOGPROB))
    found = find_rollouts(trained.run_dir.rollouts, RolloutQuery(limit=100))
    assert [(row["group"], row["outcome"]) for row in found.rollouts] == [
        (0, "trained"),
        (0, "trained"),
        (1, "dropped"),
        (1, "dropped"),
        (2, "refused"),
    ]
    assert "2 rollouts and 1 scores" in found.rollouts[-1]["reason"]
    assert [row["advantage"] for row in found.rollouts[:2]] == [0.5, -0.5]
