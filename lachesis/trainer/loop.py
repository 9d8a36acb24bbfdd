"""The training loop: a batch of scored rollouts, one policy-gradient step, new weights for the environments."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

from lachesis.config import RunConfig
from lachesis.metrics import MetricsFile, WandbSink
from lachesis.runs import RunDir
from lachesis.trainer.atropos import Atropos
from lachesis.trainer.batch import to_batch
from lachesis.trainer.canary import MOST_TOKENS, Canary
from lachesis.trainer.inference_app import TrainerState
from lachesis.trainer.keeper import Keeper
from lachesis.trainer.ledger import Clock, Ledger
from lachesis.trainer.policy import Policy
from lachesis.trainer.rollouts import RolloutFile
from lachesis.trainer.usage import rollout_metrics

T = TypeVar("T")
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
        self.wandb, self.tokenizer = wandb, tokenizer
        self.metrics = MetricsFile(folder.metrics)
        self.canary = Canary(policy)
        self.ledger = Ledger(folder, config.tinker.prices)
        self.rollouts = RolloutFile(folder.rollouts, tokenizer, config.env.total_steps)
        state.spent = lambda: self.ledger.spent(state.usage)

    async def run(self, stop: asyncio.Event) -> None:
        """Train until the last step, until a budget of tokens or money is used up, or until `stop`. A checkpoint is written at
        the end in either case, and also when an error ends the loop, if the server still takes it."""
        self.state.phase = "training"
        try:
            while self.state.step < self.config.env.total_steps and not self.state.over_budget(self.config.limits):
                if not await self._one_step(stop):
                    break
        except Exception:
            await self._save_after_error()
            raise
        await self._save()
        self.ledger.keep(self.state.usage)
        self.state.phase = "finished" if self.state.step >= self.config.env.total_steps else "stopped"

    async def _one_step(self, stop: asyncio.Event) -> bool:
        """False when told to stop while waiting for rollouts."""
        clock = Clock()
        self.state.wait_for("rollouts")
        groups = await unless(stop, self.atropos.next_batch(self.state.step))
        if groups is None:
            return False
        clock.lap("time/rollouts")
        self.keeper.groups += len(groups)
        self.state.groups = self.keeper.groups
        batch = to_batch(groups, max_tokens=self.config.tinker.max_token_trainer_length, eos_id=self.tokenizer.eos_token_id)
        found = {**rollout_metrics(groups, self.state.usage), **await self.atropos.lost()}
        losses = await self.policy.train(batch, self.state.wait_for)
        self.state.usage.trained += sum(len(datum.tokens) for datum in batch.datums)
        clock.lap("time/train")
        change = await self.canary.change()
        if batch.datums:
            self.state.wait_for("sampler")
            await self.policy.publish()
            self.state.usage.version += 1
            self.canary.ask(batch.datums[0].tokens)
        clock.lap("time/publish")
        self.state.step += 1
        self.keeper.note(batch.metrics()["reward/mean"], _some_text(groups))
        if self.state.step % self.config.tinker.save_checkpoint_interval == 0:
            await self._save()
            clock.lap("time/checkpoint")
        self.rollouts.keep(self.state.step, groups)
        known = {} if change is None else {"weights/change": change}
        self._record({**batch.metrics(), **found, **losses, **known}, clock)
        return not stop.is_set()

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


def _some_text(groups: list[dict[str, Any]]) -> list[int]:
    return [int(token) for token in groups[0]["tokens"][0][:MOST_TOKENS]]


async def unless(stop: asyncio.Event, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of `work`, or None, with `work` cancelled, when `stop` comes first."""
    task, stopped = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        task.cancel()
        stopped.cancel()
