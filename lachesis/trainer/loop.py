"""The training loop: a batch of scored rollouts, one policy-gradient step, new weights for the environments."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import Any, TypeVar

from lachesis.base.files import write_private
from lachesis.config.run_config import RunConfig
from lachesis.runs.held_out import is_evaluation_key, to_point
from lachesis.runs.metrics import MetricsFile, WandbSink
from lachesis.runs.store import RunDir
from lachesis.trainer.advantages import learning_rate
from lachesis.trainer.batch import Batch, Recipe, add_kl_penalty, to_batch
from lachesis.trainer.checkpoint_manager import Keeper
from lachesis.trainer.inference_server import TrainerState
from lachesis.trainer.policy import Policy
from lachesis.trainer.recompute_logprobs import fill
from lachesis.trainer.rollout_client import Atropos, Group
from lachesis.trainer.rollout_log import RolloutFile
from lachesis.trainer.step_metrics import Clock, Ledger
from lachesis.trainer.supervised import batches, read
from lachesis.trainer.usage import rollout_metrics
from lachesis.trainer.weight_sync_check import MOST_TOKENS, Canary

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
            penalised=config.tinker.kl_coefficient > 0,
        )
        self._ahead: asyncio.Task[Fetched | None] | None = None
        self._clock = Clock()
        """From the line of one step to that of the next."""
        self._unrecorded: dict[str, float] | None = None
        """Metrics of a step that was counted and has no line yet."""
        state.spent = lambda: self.ledger.spent(state.usage)

    async def run(self, stop: asyncio.Event) -> None:
        """Train until the last step, until a budget of tokens or money is used up, or until `stop`. A checkpoint is written at
        the end in either case, and also when an error ends the loop, if the server still takes it."""
        self.state.phase = "training"
        try:
            if self.state.step == 0 and not self.keeper.warm:
                await self._imitate(stop)
            self._begin_evaluations()
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
            self.canary.close()
        await self._save()
        await self._settle_evaluations(stop)
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
        groups = [group for number, group in enumerate(groups) if number not in batch.dropped]
        lost = asyncio.ensure_future(self.atropos.lost())
        distance = await self._stay_near_base(batch)
        found = {**batch.metrics(), **distance}
        update = asyncio.ensure_future(self._update_and_count(batch, groups, found))
        try:
            await asyncio.sleep(0)  # the server has its work before this process does its own
            found |= await asyncio.to_thread(rollout_metrics, groups, self.state.usage)
        finally:
            await asyncio.wait({update})  # a checkpoint during the update would hold it without counting it
        await update
        clock.lap("time/train")
        found |= await lost
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
        if more and self.config.is_prefetching:
            self._ahead = asyncio.ensure_future(unless(stop, self._fetch(self.state.step + 1)))
        return fetched

    async def _fetch(self, step: int) -> Fetched:
        groups = await self.atropos.next_batch(step)
        filled = await fill(groups, self.policy.sampler, self.recipe)
        self.state.usage.prefill += filled.tokens
        batch = await asyncio.to_thread(to_batch, groups, self.recipe, filled.refused)
        batch.without_logprobs = filled.rollouts
        for number, reason in batch.dropped.items():
            log.warning("group %d of %d is left out of the batch of step %d: %s", number, len(groups), step + 1, reason)
        return groups, batch

    async def _update_and_count(self, batch: Batch, groups: list[Group], metrics: dict[str, float]) -> None:
        """Train on a batch, add to its metrics, and count the step once the server has made the update, whatever fails after
        that."""
        updates = self.policy.updates
        try:
            metrics |= await self._update(batch)
        finally:
            if self.policy.updates > updates or not batch.datums:
                self.state.step += 1
                self.keeper.note(metrics["reward/mean"], _some_texts(groups))
                self._unrecorded = metrics

    async def _update(self, batch: Batch) -> dict[str, float]:
        """Train on a batch and publish the weights; what is known about it."""
        text = [*batch.datums[0].tokens, batch.datums[0].targets[-1]] if batch.datums else []
        await self.canary.before(text)
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
            gap = await self.canary.check()
            found |= {} if gap is None else {"weights/sampler_gap": gap}
        self._offer_weights(self.state.step + 1)
        change = await self.canary.change()
        if batch.datums:
            self.canary.ask(text)
        return found if change is None else {**found, "weights/change": change}

    async def _stay_near_base(self, batch: Batch) -> dict[str, float]:
        """Add the penalty on the distance to the base model to the advantages, where one is asked for."""
        coefficient = self.config.tinker.kl_coefficient
        if not coefficient or not batch.datums:
            return {}
        base_D = await self.policy.base_logprobs(batch)
        self.state.usage.prefill += sum(len(datum.tokens) for datum in batch.datums)
        return {"kl/base": add_kl_penalty(batch, base_D, coefficient, self.recipe)}

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

    def _begin_evaluations(self) -> None:
        """Evaluate what training begins with, unless an earlier attempt has done so."""
        self.state.evaluations.carry_over(self.metrics.read(), self.state.step)
        self._offer_weights(self.state.step)

    def _offer_weights(self, step: int) -> None:
        if self.policy.sampler is not None:
            self.state.evaluations.weights_published(step, self.policy.sampler)

    def _take_evaluations(self) -> dict[str, float]:
        """Return the metrics of evaluations that have ended, and note them in the checkpoints."""
        evaluations = self.state.evaluations
        while evaluations.results:
            self.keeper.note_held_out(evaluations.results.pop(0))
        return evaluations.take()

    async def _settle_evaluations(self, stop: asyncio.Event) -> None:
        """Wait for an evaluation that is under way after the last step."""
        if self.state.step >= self.config.env.total_steps:
            self.state.wait_for("evaluation")
            await self.state.evaluations.settle(stop)
        self._add_to_last_step(self._take_evaluations())

    def note_final_evaluation(self, metrics: Mapping[str, float]) -> None:
        """Add the evaluation after training to the metrics of the last step and to its checkpoint."""
        self.ledger.keep(self.state.usage)  # its tokens came after the last step
        point = to_point(metrics, self.state.step)
        if point is None:
            return
        self.keeper.note_held_out(point)
        named = {f"eval/{name}": value for name, value in point.model_dump(exclude_none=True).items()}
        self._add_to_last_step({**{key: metrics[key] for key in metrics if is_evaluation_key(key)}, **named})

    def _add_to_last_step(self, metrics: dict[str, float]) -> None:
        if metrics and self.metrics.add_evaluation(metrics) and self.wandb:
            self.wandb.log(self.state.step + 1, metrics)  # W&B would replace another result of the last step

    def _record(self, metrics: dict[str, float], clock: Clock) -> None:
        metrics = {**metrics, **self.ledger.step(self.state.usage, clock.since_start()), **clock.metrics()}
        metrics |= self._take_evaluations()
        self.metrics.append(self.state.step, metrics)
        self._unrecorded = None
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
        """Save the steps that were counted, with the line of the last one. After an error in the middle of an update nothing
        is saved, because the weights may hold a part of it."""
        if self.policy.update_under_way:
            log.warning("no checkpoint after an error in the middle of an update; the last one is of step %d", self.keeper.step)
            return
        try:
            if self._unrecorded is not None:
                self._record(self._unrecorded, self._clock)
        except Exception as error:
            log.warning("step %d has no line in the metrics: %s", self.state.step, error)
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
