"""Save a run's checkpoints, verify that training resumes from them, and delete old checkpoints."""

import asyncio
import collections
import logging
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tinker
from pydantic import BaseModel, ConfigDict

from lachesis.base.errors import StorageError
from lachesis.base.timestamps import now_iso
from lachesis.checkpoints.manifests import Checkpoints, HeldOutResult, Manifest, Probe
from lachesis.rollout_api.scored_group import get_environment
from lachesis.runs.held_out_results import HeldOutPoint
from lachesis.trainer.trained_model import Policy

log = logging.getLogger(__name__)
SERVER_TIMEOUT_S = 30.0
# Maximum change in nats per token; the same weights on the same server differ by rounding only.
MAX_LOSS_CHANGE = 1e-3


class ResumePoint(BaseModel):
    """Describe the checkpoint and the step that training was resumed from."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    step: int
    state: str
    optimizer: bool = True
    """Whether Adam's moments were restored; a state without them is refused."""
    groups: int
    """Number of groups that training had received by then. Later ones are dropped, and their items
    are sampled again.
    """
    loss_change: float | None = None
    """Mean negative log-probability of a stored text now minus that at the save, in nats per token;
    null if it could not be computed.
    """
    at: str


class CheckpointManager:
    """Manage the checkpoints of one attempt of a run.

    `groups` counts the groups that training has received over all attempts, and
    `groups_by_environment` those of each environment if there are several. A checkpoint holds the
    counts of the steps that were made; a resumed run requests later groups again.
    """

    def __init__(
        self,
        policy: Policy,
        checkpoints: Checkpoints,
        *,
        num_to_keep: int,
        resume_checkpoint: Manifest | None,
    ) -> None:
        self.policy, self.checkpoints, self.num_to_keep = policy, checkpoints, num_to_keep
        self.checkpoints.folder.mkdir(exist_ok=True)
        self.checkpoints.set_aside(after=resume_checkpoint.step if resume_checkpoint else 0)
        self.step = resume_checkpoint.step if resume_checkpoint else 0
        # Whether the weights include the supervised fine-tuning before the first step.
        self.is_sft_done = resume_checkpoint is not None and not resume_checkpoint.is_forked
        self.groups = resume_checkpoint.groups if resume_checkpoint else 0
        self.groups_by_environment = collections.Counter(
            resume_checkpoint.groups_by_environment if resume_checkpoint else {}
        )
        self._groups_at_last_step = self.groups, dict(self.groups_by_environment)
        self._probe_tokens = _get_probe_tokens(resume_checkpoint)
        self._rewards: list[float] = []
        # Steps of all checkpoints, including deleted ones.
        self._saved_steps = sorted(manifest.step for manifest in checkpoints.list_intact())
        # The newest held-out result since the last checkpoint.
        self._pending_held_out: HeldOutResult | None = None
        # Returns the step that is being evaluated, or whose result was not noted yet.
        self.get_evaluated_step: Callable[[], int | None] = lambda: None

    def count_received_groups(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Count groups that training has received."""
        self.groups += len(groups)
        self.groups_by_environment.update(
            name for group in groups if (name := get_environment(group))
        )

    def count_step(self, reward: float, token_lists: list[list[int]]) -> None:
        """Count a step on all groups so far; the first `token_lists` become probe texts."""
        self._rewards.append(reward)
        self._groups_at_last_step = self.groups, dict(self.groups_by_environment)
        self._probe_tokens = self._probe_tokens or [
            tokens for tokens in token_lists if len(tokens) > 1
        ]

    def note_held_out(self, point: HeldOutPoint) -> None:
        """Add a held-out result to the checkpoint that it belongs to.

        That is the checkpoint of the evaluated step or, if there is none, the first one after it.
        The result of step 0 says nothing about a later checkpoint.
        """
        held_out = HeldOutResult(
            percent_correct=point.percent_correct, items=point.items or 0, step=point.step
        )
        # A newer checkpoint has other weights, but none has weights closer to those that were
        # evaluated.
        later_steps = [step for step in self._saved_steps if step >= point.step]
        if point.step == 0 and later_steps[:1] != [0]:
            return
        if not later_steps:
            self._pending_held_out = held_out
            return
        try:
            self.checkpoints.note_held_out(later_steps[0], held_out)
        except StorageError as error:  # The metrics hold the result too.
            log.warning(
                "the checkpoint of step %d has no held-out result: %s", later_steps[0], error
            )

    def _find_checkpoint_under_evaluation(self) -> int | None:
        """Return the step of the saved checkpoint that the awaited evaluation belongs to."""
        evaluated_step = self.get_evaluated_step()
        if evaluated_step is None:
            return None
        return next((step for step in self._saved_steps if step >= evaluated_step), None)

    async def save(self, step: int, *, is_final: bool = False) -> None:
        """Save a checkpoint of this step unless it exists, then delete superseded checkpoints.

        Raises:
            Exception: The server or the disk refused.
        """
        if step <= self.step and not (step == 0 and not self.is_sft_done):
            return
        self.is_sft_done = True
        paths = await self.policy.save(f"step-{step:06d}")
        reward = statistics.fmean(self._rewards) if self._rewards else None
        groups, groups_by_environment = self._groups_at_last_step
        # Measured with the saved weights, so that a resume can prove that it has loaded them.
        probes = await self._measure_probes()
        manifest = Manifest(
            step=step,
            is_final=is_final,
            groups=groups,
            groups_by_environment=groups_by_environment,
            reward=reward,
            held_out=self._pending_held_out,
            probes=probes,
            **paths,
        )
        try:
            await asyncio.to_thread(self.checkpoints.write, manifest)
        except Exception:
            # A cancellation is not handled: the thread may still be writing the manifest.
            await self.policy.discard(paths.values())
            raise
        self.step, self._rewards, self._pending_held_out = step, [], None
        self._saved_steps = sorted({*self._saved_steps, step})
        for old in self.checkpoints.find_superseded(
            self.num_to_keep, spared_step=self._find_checkpoint_under_evaluation()
        ):
            await self._remove(old)
        await self.renew_all()

    async def renew_all(self) -> None:
        """Let the kept checkpoints live on where the server gives them a time to live."""
        for manifest in self.checkpoints.list_intact():
            if manifest.files:  # The embedded engine keeps them on this machine.
                continue
            try:
                async with asyncio.timeout(SERVER_TIMEOUT_S):
                    expiries = [
                        await self.policy.renew(path)
                        for path in (manifest.state, manifest.sampler_weights)
                    ]
                earliest = min(filter(None, expiries), default=None)
                self.checkpoints.note_expiry(manifest.step, earliest)
            except Exception as error:  # The checkpoint is there all the same.
                log.warning(
                    "the time to live of the checkpoint of step %d was not renewed: %r",
                    manifest.step,
                    error,
                )

    async def verify_resume(self, manifest: Manifest) -> ResumePoint:
        """Compare loaded and saved weights by the log-probabilities of a prompt."""
        loaded_probes = await self._measure_probes()
        loss_change = None
        if manifest.probes and loaded_probes:
            saved_logprobs, loaded_logprobs = manifest.probes[0].logprobs, loaded_probes[0].logprobs
            loss_change = float(np.mean(saved_logprobs) - np.mean(loaded_logprobs))
        if loss_change is not None and abs(loss_change) > MAX_LOSS_CHANGE:
            log.warning(
                "the loaded weights differ from the saved ones: %+.2e nats per token of a stored "
                "text",
                loss_change,
            )
        resume_point = ResumePoint(
            step=manifest.step,
            state=manifest.state,
            groups=manifest.groups,
            loss_change=loss_change,
            at=now_iso(),
        )
        log.info("resumed: %s", resume_point.model_dump_json())
        return resume_point

    async def _measure_probes(self) -> list[Probe]:
        """Return the sampler's log-probabilities of the probe texts, or none."""
        sampler = self.policy.sampler
        if sampler is None:
            return []
        try:
            async with asyncio.timeout(SERVER_TIMEOUT_S):
                requests = (
                    self.policy.request_logprobs(sampler, tinker.ModelInput.from_ints(tokens))
                    for tokens in self._probe_tokens
                )
                logprob_lists = await asyncio.gather(*requests)
        except Exception as error:  # A checkpoint without probes is better than none.
            log.warning("the checkpoint has no text to compare with: %r", error)
            return []
        return [
            Probe(tokens=tokens, logprobs=[float(value or 0.0) for value in logprobs[1:]])
            for tokens, logprobs in zip(self._probe_tokens, logprob_lists, strict=True)
        ]

    async def _remove(self, manifest: Manifest) -> None:
        self.checkpoints.remove_manifest(manifest)
        await self.policy.discard((manifest.state, manifest.sampler_weights), SERVER_TIMEOUT_S)


def _get_probe_tokens(checkpoint: Manifest | None) -> list[list[int]]:
    """Return the texts that later checkpoints of the run are compared by."""
    if checkpoint is None:
        return []
    return [probe.tokens for probe in checkpoint.probes]
