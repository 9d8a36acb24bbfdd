"""The training loop: a batch of scored rollouts, one policy-gradient step, new weights for the environments."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from lachesis.config import RunConfig
from lachesis.files import write_private
from lachesis.metrics import MetricsFile, WandbSink
from lachesis.runs import RunDir
from lachesis.trainer.advantages import kl_penalties, learning_rate
from lachesis.trainer.atropos import Atropos, Group
from lachesis.trainer.batch import Batch, Recipe, to_batch
from lachesis.trainer.canary import MOST_TOKENS, Canary
from lachesis.trainer.inference_app import TrainerState
from lachesis.trainer.keeper import Keeper
from lachesis.trainer.ledger import Clock, Ledger
from lachesis.trainer.missing import fill
from lachesis.trainer.policy import Policy
from lachesis.trainer.rollouts import RolloutFile
from lachesis.trainer.supervised import batches, read
from lachesis.trainer.usage import rollout_metrics

T = TypeVar("T")
Fetched = tuple[list[Group], Batch]
"""Groups as they came, and what is trained on of them."""
TEXTS = 4
"""So many texts of the first batch are kept, to compare checkpoints by."""
log = logging.getLogger(__name__)


class Trainer:
    """One run of the loop, from `first_step` to the configured number of steps."""

    def __init__(
        self,
        config: RunConfig,
        policy: Policy,
        atropos: Atropos,
        *,
        keeper: Keeper,
        state: TrainerState,
        folder: RunDir,
        wandb: WandbSink | None,
        tokenizer: Any,
    ) -> None:
        self.config, self.policy, self.atropos, self.keeper, self.state = config, policy, atropos, keeper, state
        self.wandb, self.tokenizer, self.folder = wandb, tokenizer, folder
        self.metrics = MetricsFile(folder.metrics)
        self.canary = Canary(policy)
        self.ledger = Ledger(folder, config.tinker.prices)
        self.rollouts = RolloutFile(folder.rollouts, tokenizer, config.env.total_steps)
        self.recipe = Recipe(
            max_tokens=config.tinker.max_token_trainer_length,
            eos_id=tokenizer.eos_token_id,
            advantage=config.tinker.advantage,
            weight_by=config.tinker.weight_by,
            was_cut=state.usage.was_cut if config.tinker.cut_rollouts == "leave_out" else None,
        )
        self._ahead: asyncio.Task[Fetched | None] | None = None
        self._clock = Clock()
        """From the line of one step to that of the next."""
        self._proven = False
        """Whether the first update was seen to reach the environments."""
        state.spent = lambda: self.ledger.spent(state.usage)

    async def run(self, stop: asyncio.Event) -> None:
        """Train until the last step, until a budget of tokens or money is used up, or until `stop`. A checkpoint is written at
        the end in either case, and also when an error ends the loop, if the server still takes it."""
        self.state.phase = "training"
        try:
            if self.state.step == 0 and not self.keeper.warm:
                await self._imitate(stop)
            self._clock = Clock()
            while self.state.step < self.config.env.total_steps and not self.state.over_budget(self.config.limits):
                if not await self._one_step(stop):
                    break
        except Exception:
            await self._save_after_error()
            raise
        finally:
            if self._ahead:
                self._ahead.cancel()
        await self._save()
        self.ledger.keep(self.state.usage)
        self.state.phase = "finished" if self.state.step >= self.config.env.total_steps else "stopped"

    async def _one_step(self, stop: asyncio.Event) -> bool:
        """False when told to stop while waiting for rollouts."""
        clock = self._clock
        self.state.wait_for("rollouts")
        fetched = await self._next(stop)
        if fetched is None:
            return False
        groups, batch = fetched
        clock.lap("time/rollouts")
        self.keeper.receive(groups)
        self.state.groups, self.state.mixture = self.keeper.groups, dict(self.keeper.mixture)
        lost = asyncio.ensure_future(self.atropos.lost())
        found = {**batch.metrics(), **await self._stay_near_base(batch)}
        update = asyncio.ensure_future(self._update(batch))
        await asyncio.sleep(0)  # the server has its work before this process does its own
        found |= {**rollout_metrics(groups, self.state.usage), **await update}
        clock.lap("time/train")
        found |= await lost
        self.state.step += 1
        self.keeper.note(found["reward/mean"], _some_texts(groups))
        self.rollouts.keep(self.state.step, groups)
        self._record(found, clock)
        self._clock = Clock()
        if self.state.step % self.config.tinker.save_checkpoint_interval == 0:
            await self._save()  # after the step's line: a resume from here must find it
            self._clock.lap("time/checkpoint")
        return not stop.is_set()

    async def _next(self, stop: asyncio.Event) -> Fetched | None:
        """The next batch; None when told to stop. Where several may wait, one of them waits here, fetched while the last one is
        trained on."""
        task = self._ahead or asyncio.ensure_future(unless(stop, self._fetch(self.state.step)))
        fetched = await task
        more = fetched is not None and self.state.step + 1 < self.config.env.total_steps
        self._ahead = None
        if more and self.config.fetches_ahead:
            self._ahead = asyncio.ensure_future(unless(stop, self._fetch(self.state.step + 1)))
        return fetched

    async def _fetch(self, step: int) -> Fetched:
        groups = await self.atropos.next_batch(step)
        rollouts, tokens = await fill(groups, self.policy.sampler, self.recipe.max_tokens)
        self.state.usage.prefill += tokens
        batch = to_batch(groups, self.recipe)
        batch.without_logprobs = rollouts
        return groups, batch

    async def _update(self, batch: Batch) -> dict[str, float]:
        """Train on a batch and publish the weights; what is known about it."""
        first = bool(batch.datums) and not self._proven
        if first:
            await self.canary.before(batch.datums[0].tokens)
        tinker = self.config.tinker
        rate = learning_rate(
            tinker.learning_rate,
            self.state.step,
            self.config.env.total_steps,
            schedule=tinker.learning_rate_schedule,
            warmup=tinker.learning_rate_warmup,
        )
        found = await self.policy.train(batch, rate, self.state.wait_for)
        self.state.usage.trained += sum(len(datum.tokens) for datum in batch.datums)
        if batch.datums:
            self.state.usage.version += 1
        if first:
            await self.canary.check()
            self._proven = True
        change = await self.canary.change()
        if batch.datums:
            self.canary.ask(batch.datums[0].tokens)
        return found if change is None else {**found, "weights/change": change}

    async def _stay_near_base(self, batch: Batch) -> dict[str, float]:
        """Add the penalty on the distance to the base model to the advantages, where one is asked for."""
        coefficient = self.config.tinker.kl_coefficient
        if not coefficient or not batch.datums:
            return {}
        base_D = await self.policy.base_logprobs(batch)
        self.state.usage.prefill += sum(len(datum.tokens) for datum in batch.datums)
        sampling_D = [datum.logprobs[datum.trained].astype(np.float64) for datum in batch.datums]
        penalties_D, mean = kl_penalties(sampling_D, base_D, coefficient)
        for datum, penalty in zip(batch.datums, penalties_D, strict=True):
            datum.advantages[datum.trained] += penalty.astype(np.float32)
        return {"kl/base": mean}

    async def _imitate(self, stop: asyncio.Event) -> None:
        """Train on the examples of the supervised file, if there is one. A line per update goes to the log, and the loss of
        the first and of the last into `supervised.json`."""
        tinker = self.config.tinker
        if tinker.supervised_file is None:
            return
        self.state.phase = "imitating"
        examples = read(Path(tinker.supervised_file), self.tokenizer, most_tokens=tinker.max_token_trainer_length)
        batches_ = list(batches(examples, size=tinker.supervised_batch_size, epochs=tinker.supervised_epochs, seed=tinker.seed))
        losses: list[float] = []
        for number, batch in enumerate(batches_, 1):
            if stop.is_set():
                return
            self.state.wait_for("forward_backward")
            losses.append(await self.policy.imitate(batch, tinker.supervised_learning_rate))
            self.state.usage.trained += sum(len(one.tokens) for one in batch)
            log.info("supervised update %d/%d loss %.4f", number, len(batches_), losses[-1])
        await self.policy.publish()
        self.state.usage.version += 1
        kept = {"examples": len(examples), "updates": len(losses), "first_loss": losses[0], "last_loss": losses[-1]}
        write_private(self.folder.path / "supervised.json", json.dumps(kept))
        self.state.wait_for("checkpoint")
        await self.keeper.save(0)
        self.state.phase = "training"

    def _record(self, metrics: dict[str, float], clock: Clock) -> None:
        metrics = {**metrics, **self.ledger.step(self.state.usage, clock.since_start()), **clock.metrics()}
        self.metrics.append(self.state.step, metrics)
        if self.wandb:
            self.wandb.log(self.state.step, metrics)
            self.state.wandb_url, self.state.wandb_error = self.wandb.url, self.wandb.error
        log.info("step %d/%d reward %.3f", self.state.step, self.config.env.total_steps, metrics["reward/mean"])

    async def _save(self) -> None:
        if self.state.step > self.keeper.step:
            self.state.wait_for("checkpoint")
            self.ledger.keep(self.state.usage)
            await self.keeper.save(self.state.step, final=self.state.step >= self.config.env.total_steps)

    async def _save_after_error(self) -> None:
        try:
            async with asyncio.timeout(15):
                await self._save()
        except Exception as error:
            log.warning("no checkpoint after the error: %s; the last one is of step %d", error, self.keeper.step)


def _some_texts(groups: list[Group]) -> list[list[int]]:
    """The beginnings of one rollout each of a few groups."""
    return [[int(token) for token in group["tokens"][0][:MOST_TOKENS]] for group in groups[:TEXTS] if group["tokens"]]


async def unless(stop: asyncio.Event, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of `work`, or None, with `work` cancelled, when `stop` comes first."""
    task, stopped = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        task.cancel()
        stopped.cancel()
