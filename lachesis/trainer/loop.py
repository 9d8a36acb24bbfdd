"""Run the training loop: fetch a batch, take a policy-gradient step, publish weights."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from lachesis.base.errors import BatchError
from lachesis.base.stop_event import run_unless_stopped
from lachesis.config.run_config import RunConfig
from lachesis.rollouts.parquet_files import RolloutFolder
from lachesis.rollouts.writer import RolloutWriter, StepRollouts
from lachesis.runs.folder import RunDir
from lachesis.runs.metrics import MetricsFile
from lachesis.trainer.batch.advantages import compute_learning_rate
from lachesis.trainer.batch.group_to_datums import Batch, BatchSettings, to_batch
from lachesis.trainer.batch.kl_penalty import add_kl_penalty
from lachesis.trainer.batch.missing_logprobs import fill_missing_logprobs
from lachesis.trainer.checkpoint_saving import CheckpointManager
from lachesis.trainer.loss_metrics import compute_rollout_metrics
from lachesis.trainer.rollout_client import RolloutClient, ScoredGroup
from lachesis.trainer.sft import run_sft_stage
from lachesis.trainer.step_accounting import StepAccounting, StepTimer
from lachesis.trainer.trackers import Trackers
from lachesis.trainer.trained_model import Policy
from lachesis.trainer.trainer_state import TrainerState
from lachesis.weight_agreement.at_weight_sync import WeightSyncCheck, select_probe_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# The groups as they came, and the batch made from them.
FetchedBatch = tuple[list[ScoredGroup], Batch]
log = logging.getLogger(__name__)


class Trainer:
    """Run the loop from the first step to the configured number of steps."""

    def __init__(
        self,
        config: RunConfig,
        policy: Policy,
        rollout_client: RolloutClient,
        *,
        checkpoint_manager: CheckpointManager,
        state: TrainerState,
        run_dir: RunDir,
        trackers: Trackers,
        tokenizer: PreTrainedTokenizerBase,
    ) -> None:
        self.config, self.policy, self.rollout_client, self.checkpoint_manager, self.state = (
            config,
            policy,
            rollout_client,
            checkpoint_manager,
            state,
        )
        self.trackers, self.tokenizer, self.run_dir = trackers, tokenizer, run_dir
        self.metrics_file = MetricsFile(run_dir.metrics)
        self.weight_sync_check = WeightSyncCheck(policy)
        self.step_accounting = StepAccounting(run_dir, config.prices)
        self.rollout_writer = RolloutWriter(
            RolloutFolder(run_dir.rollouts, int(config.rollouts.max_gb * 1e9)),
            tokenizer,
            state.usage,
            environment=config.environment,
        )
        self.batch_settings = BatchSettings(
            max_tokens=config.tinker.max_token_trainer_length,
            eos_id=tokenizer.eos_token_id,
            advantage=config.tinker.advantage,
            loss_aggregation=config.tinker.loss_aggregation,
            was_truncated=state.usage.was_truncated
            if config.tinker.truncated_rollouts == "drop"
            else None,
            has_kl_penalty=config.tinker.kl_coefficient > 0,
        )
        self._prefetch_task: asyncio.Task[FetchedBatch | None] | None = None
        # Measures the time from the line of one step to that of the next.
        self._step_timer = StepTimer()
        # Groups that the API had refused by the last step.
        self._num_refused = 0.0
        # Metrics of a step that was counted but not written yet.
        self._unwritten_metrics: dict[str, float] | None = None
        state.get_spent = lambda: self.step_accounting.compute_spent(state.usage)

    async def run(self, stop: asyncio.Event) -> None:
        """Train until the last step, until a budget of tokens or money is used up, or until `stop`
        is set.

        A checkpoint is saved at the end, also after an error if the server still accepts it.
        """
        self.state.phase = "training"
        await asyncio.to_thread(self.rollout_writer.start, self.state.step)
        try:
            if self.state.step == 0 and not self.checkpoint_manager.is_sft_done:
                await run_sft_stage(
                    self.config,
                    self.policy,
                    self.tokenizer,
                    self.state,
                    self.checkpoint_manager,
                    stop,
                )
            self._begin_evaluations()
            self._step_timer = StepTimer()
            while self.state.step < self.config.env.total_steps:
                if not await self._run_step(stop):
                    break
        except Exception:
            await self._save_after_error()
            raise
        finally:
            if self._prefetch_task:
                self._prefetch_task.cancel()
            self.weight_sync_check.close()
            await asyncio.to_thread(self.rollout_writer.close)
        await self._save()
        await self._wait_for_evaluations(stop)
        self.step_accounting.write_spent(self.state.usage)
        is_finished = self.state.step >= self.config.env.total_steps
        self.state.phase = "finished" if is_finished else "stopped"

    async def _run_step(self, stop: asyncio.Event) -> bool:
        """Run one step; return False if `stop` was set while waiting for rollouts."""
        timer = self._step_timer
        self.state.set_waiting_for("rollouts")
        fetched = await self._next_batch(stop)
        if fetched is None:
            return False
        groups, batch = fetched
        received_groups = groups
        timer.lap("time/rollouts")
        self.checkpoint_manager.count_received_groups(groups)
        self.state.groups, self.state.groups_by_environment = (
            self.checkpoint_manager.groups,
            dict(self.checkpoint_manager.groups_by_environment),
        )
        # Dropped groups were received, so that a resume does not repeat them, but nothing is
        # learned from them.
        groups = [
            group
            for group_index, group in enumerate(groups)
            if group_index not in batch.drop_reasons
        ]
        # The API answers while the server trains.
        queue_counts_task = asyncio.ensure_future(self.rollout_client.read_queue_counts())
        kl_metrics = await self._apply_kl_penalty(batch)
        metrics = {**batch.compute_metrics(), **kl_metrics}
        update_task = asyncio.ensure_future(self._update_and_count(batch, groups, metrics))
        try:
            await asyncio.sleep(0)  # Send the requests before this process computes anything.
            metrics |= await asyncio.to_thread(compute_rollout_metrics, groups, self.state.usage)
        except asyncio.CancelledError:
            update_task.cancel()  # A server that has ended the run may never answer.
            raise
        finally:
            # A checkpoint during the update would contain it without counting it.
            await asyncio.wait({update_task})
        await update_task
        timer.lap("time/train")
        metrics |= await queue_counts_task
        refused = await self._take_refused_groups(metrics.get("queue/refused", 0.0))
        self.rollout_writer.add(StepRollouts(self.state.step, received_groups, batch, refused))
        self._write_step_metrics(metrics, timer)
        self._step_timer = StepTimer()
        if self.state.step % self.config.tinker.save_checkpoint_interval == 0:
            await self._save()  # After the step's line, which a resume from here must find.
            self._step_timer.lap("time/checkpoint")
        return not stop.is_set()

    async def _take_refused_groups(self, num_refused: float) -> list[tuple[str, Any]]:
        """Return the groups that were refused since the last step, with the reasons."""
        num_refused_before, self._num_refused = self._num_refused, num_refused
        if num_refused == num_refused_before:
            return []
        return await self.rollout_client.take_refused_groups()

    async def _next_batch(self, stop: asyncio.Event) -> FetchedBatch | None:
        """Return the next batch, or None if `stop` is set.

        If several batches may wait, the next one is fetched while the last one is trained on.
        """
        task = self._prefetch_task or asyncio.ensure_future(
            run_unless_stopped(stop, self._fetch_batch(self.state.step))
        )
        fetched = await task
        has_next_step = fetched is not None and self.state.step + 1 < self.config.env.total_steps
        self._prefetch_task = None
        if has_next_step and self.config.is_prefetching:
            self._prefetch_task = asyncio.ensure_future(
                run_unless_stopped(stop, self._fetch_batch(self.state.step + 1))
            )
        return fetched

    async def _fetch_batch(self, step: int) -> FetchedBatch:
        """Return the next batch as datums, with log-probabilities that were missing."""
        groups = await self.rollout_client.next_batch(step)
        recomputed = await fill_missing_logprobs(groups, self.policy.sampler, self.batch_settings)
        self.state.usage.prefill += recomputed.num_tokens
        self.state.usage.sampled += recomputed.num_rollouts
        try:
            batch = await asyncio.to_thread(
                to_batch, groups, self.batch_settings, recomputed.refusal_reasons
            )
        except BatchError as error:  # The run ends; the rollouts show why.
            reasons = dict.fromkeys(range(len(groups)), str(error))
            self.rollout_writer.add(StepRollouts(step + 1, groups, Batch(drop_reasons=reasons)))
            raise
        batch.num_without_logprobs = recomputed.num_rollouts
        for group_index, reason in batch.drop_reasons.items():
            log.warning(
                "group %d of %d is dropped from the batch of step %d: %s",
                group_index,
                len(groups),
                step + 1,
                reason,
            )
        return groups, batch

    async def _update_and_count(
        self, batch: Batch, groups: list[ScoredGroup], metrics: dict[str, float]
    ) -> None:
        """Train on a batch, add its metrics, and count the step once the server has it."""
        num_updates_before = self.policy.num_updates
        try:
            metrics |= await self._update(batch)
        finally:
            # The weights may have changed although the step failed later, at publishing for
            # example. A step that was not counted would be repeated on top of its own update.
            if self.policy.num_updates > num_updates_before or not batch.datums:
                self.state.step += 1
                self.checkpoint_manager.count_step(
                    metrics["reward/mean"], select_probe_tokens(groups)
                )
                self._unwritten_metrics = metrics

    async def _update(self, batch: Batch) -> dict[str, float]:
        """Train on a batch, publish the weights, and return the metrics."""
        if batch.datums:
            probe_tokens = [*batch.datums[0].tokens, batch.datums[0].targets[-1]]
        else:
            probe_tokens = []
        await self.weight_sync_check.take_reference(probe_tokens)
        tinker_config = self.config.tinker
        rate = compute_learning_rate(
            tinker_config.learning_rate,
            self.state.step,
            self.config.env.total_steps,
            schedule=tinker_config.learning_rate_schedule,
            warmup_steps=tinker_config.learning_rate_warmup,
        )
        metrics = await self.policy.train(batch, rate, self.state.set_waiting_for)
        self.state.usage.trained += sum(len(datum.tokens) for datum in batch.datums)
        if batch.datums:
            self.state.usage.version += 1
            gap = await self.weight_sync_check.check()
            if gap is not None:
                metrics |= {"weights/sampler_gap": gap}
        # The new weights are published, so an evaluation of this step can sample from them.
        self._start_evaluation_if_due(self.state.step + 1)
        change = await self.weight_sync_check.finish_change_measurement()
        if batch.datums:
            self.weight_sync_check.start_change_measurement(probe_tokens)
        if change is None:
            return metrics
        return {**metrics, "weights/change": change}

    async def _apply_kl_penalty(self, batch: Batch) -> dict[str, float]:
        """Add the KL penalty to the advantages if one is configured."""
        coefficient = self.config.tinker.kl_coefficient
        if not coefficient or not batch.datums:
            return {}
        base_logprobs_D = await self.policy.compute_base_logprobs(batch)
        return {"kl/base": add_kl_penalty(batch, base_logprobs_D, coefficient, self.batch_settings)}

    def _begin_evaluations(self) -> None:
        """Evaluate the initial weights unless an earlier attempt has done so."""
        self.state.evaluations.restore_from_metrics(self.metrics_file.read(), self.state.step)
        self._start_evaluation_if_due(self.state.step)

    def _start_evaluation_if_due(self, step: int) -> None:
        if self.policy.sampler is not None:
            self.state.evaluations.start_round_if_due(step, self.policy.sampler)

    def _take_evaluations(self) -> dict[str, float]:
        """Return metrics of evaluations that have ended, and add results to the checkpoints."""
        evaluations = self.state.evaluations
        while evaluations.results:
            self.checkpoint_manager.note_held_out(evaluations.results.pop(0))
        return evaluations.take_metrics()

    async def _wait_for_evaluations(self, stop: asyncio.Event) -> None:
        """Wait for a running evaluation after the last step."""
        if self.state.step >= self.config.env.total_steps:
            self.state.set_waiting_for("evaluation")
            await self.state.evaluations.wait_for_last_round(stop)
        while metrics := self._take_evaluations():
            self._add_to_last_step(metrics)

    def _add_to_last_step(self, metrics: dict[str, float]) -> None:
        if metrics and self.metrics_file.add_evaluation(metrics):
            # At the last step itself, W&B would replace another result.
            self.trackers.log(self.state.step + 1, metrics)

    def _write_step_metrics(self, metrics: dict[str, float], timer: StepTimer) -> None:
        """Write the line of a step, with counts, times, costs and results that have arrived."""
        metrics = {
            **metrics,
            **self.step_accounting.compute_step_metrics(
                self.state.usage, timer.measure_elapsed_s()
            ),
            **timer.to_metrics(),
        }
        metrics |= self._take_evaluations()
        self.metrics_file.append(self.state.step, metrics)
        self._unwritten_metrics = None
        self.trackers.log(self.state.step, metrics)
        if wandb := self.trackers.wandb:
            self.state.wandb_url, self.state.wandb_error = wandb.url, wandb.error
        log.info(
            "step %d/%d reward %.3f",
            self.state.step,
            self.config.env.total_steps,
            metrics["reward/mean"],
        )

    async def _save(self) -> None:
        if self.state.step > self.checkpoint_manager.step:
            self.state.set_waiting_for("checkpoint")
            self.step_accounting.write_spent(self.state.usage)
            await self.checkpoint_manager.save(
                self.state.step, is_final=self.state.step >= self.config.env.total_steps
            )

    async def _save_after_error(self) -> None:
        """Save the counted steps, and write the metrics line of the last step.

        After an error during an update nothing is saved, because the weights may contain part of
        it.
        """
        if self.policy.is_update_under_way:
            log.warning(
                "no checkpoint after an error in the middle of an update; the last one is of step "
                "%d",
                self.checkpoint_manager.step,
            )
            return
        try:
            if self._unwritten_metrics is not None:
                self._write_step_metrics(self._unwritten_metrics, self._step_timer)
        except Exception as error:
            log.warning("the metrics of step %d were not written: %s", self.state.step, error)
        try:
            async with asyncio.timeout(15):
                await self._save()
        except Exception as error:
            log.warning(
                "no checkpoint after the error: %s; the last one is of step %d",
                error,
                self.checkpoint_manager.step,
            )
