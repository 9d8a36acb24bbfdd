"""Keeps a run's checkpoints: writes them, proves that training goes on from what was written, and deletes what nobody needs."""

from __future__ import annotations

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
from lachesis.runs.checkpoints import Checkpoints, HeldOutResult, Manifest, Probe, ReferenceLoss
from lachesis.runs.held_out import HeldOutPoint
from lachesis.runs.store import now_iso
from lachesis.trainer.batch import environment_of
from lachesis.trainer.policy import Policy

log = logging.getLogger(__name__)
ASK_S = 30.0
SAME = 1e-3
"""Nats per token; the same weights on the same server differ by rounding only."""


class Receipt(BaseModel):
    """What training goes on from."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    step: int
    state: str
    optimizer: bool = True
    """Whether Adam's moments came back with the weights; a state without them is refused."""
    groups: int
    """Groups that training had received by then. What was queued after them is dropped, and its items are asked anew."""
    loss_change: float | None = None
    """Mean negative log-probability of a kept text now minus that when it was saved, in nats per token; null when it could not
    be asked."""
    at: str


class Keeper:
    """Of one attempt of a run. `groups` counts those that training has received, over all attempts, `mixture` those of each of
    several environments. A checkpoint names those of the steps that were made: a resume asks for the others again."""

    def __init__(self, policy: Policy, checkpoints: Checkpoints, *, keep: int, newest: Manifest | None) -> None:
        self.policy, self.checkpoints, self.keep = policy, checkpoints, keep
        self.checkpoints.folder.mkdir(exist_ok=True)
        self.checkpoints.set_aside(after=newest.step if newest else 0)
        self.step = newest.step if newest else 0
        self.warm = newest is not None and not newest.borrowed
        """Whether what comes before the first step, training on examples, is in the weights."""
        self.groups = newest.groups if newest else 0
        self.mixture = collections.Counter(newest.mixture if newest else {})
        self._trained = self.groups, dict(self.mixture)
        self._texts = [probe.tokens for probe in newest.probes] if newest else []
        if newest and newest.reference and not self._texts:
            self._texts = [newest.reference.tokens]
        self._rewards: list[float] = []
        self._saved = sorted(one.step for one in checkpoints.list_intact())
        """Steps of checkpoints, also of those that are gone."""
        self._held_out: HeldOutResult | None = None
        """The newest held-out result since the last checkpoint."""
        self.evaluated_step: Callable[[], int | None] = lambda: None
        """Gives the step whose evaluation is under way, or whose result was not noted yet."""

    def receive(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Training has received these."""
        self.groups += len(groups)
        self.mixture.update(name for group in groups if (name := environment_of(group)))

    def note(self, reward: float, texts: list[list[int]]) -> None:
        """Count a step on all groups that were received; the first `texts` are kept to compare checkpoints with."""
        self._rewards.append(reward)
        self._trained = self.groups, dict(self.mixture)
        self._texts = self._texts or [text for text in texts if len(text) > 1]

    def note_held_out(self, point: HeldOutPoint) -> None:
        """Give a held-out result to the checkpoint that it belongs to.

        It belongs to the checkpoint of the evaluated step or, if there is none, to the first one after it. The
        result of step 0 says nothing about a later checkpoint.
        """
        held_out = HeldOutResult(percent_correct=point.percent_correct, items=point.items or 0, step=point.step)
        later = [step for step in self._saved if step >= point.step]
        if point.step == 0 and later[:1] != [0]:
            return
        if not later:
            self._held_out = held_out
            return
        try:
            self.checkpoints.note_held_out(later[0], held_out)
        except StorageError as error:  # the metrics have it
            log.warning("the checkpoint of step %d has no held-out result: %s", later[0], error)

    def _checkpoint_under_evaluation(self) -> int | None:
        """Return the step of the saved checkpoint that the awaited evaluation belongs to."""
        evaluated = self.evaluated_step()
        return None if evaluated is None else next((step for step in self._saved if step >= evaluated), None)

    async def save(self, step: int, *, final: bool = False) -> None:
        """A checkpoint of this step, unless there is one; then those that are superseded go. Raises what the server or the disk
        says."""
        if step <= self.step and not (step == 0 and not self.warm):
            return
        self.warm = True
        paths = await self.policy.save(f"step-{step:06d}")
        reward = statistics.fmean(self._rewards) if self._rewards else None
        groups, mixture = self._trained
        probes = await self._probes()
        manifest = Manifest(
            step=step,
            final=final,
            groups=groups,
            mixture=mixture,
            reward=reward,
            held_out=self._held_out,
            reference=_reference(probes),
            probes=probes,
            **paths,
        )
        try:
            await asyncio.to_thread(self.checkpoints.write, manifest)
        except Exception:  # but not a cancellation, during which the thread may still write the manifest
            await self.policy.discard(paths.values())
            raise
        self.step, self._rewards, self._held_out = step, [], None
        self._saved = sorted({*self._saved, step})
        for old in self.checkpoints.find_superseded(self.keep, spared_step=self._checkpoint_under_evaluation()):
            await self._remove(old)

    async def receipt(self, manifest: Manifest) -> Receipt:
        """Compare the weights that were loaded with those that were saved, by what they say of a text; ask after publishing."""
        known, now_ = manifest.reference, _reference(await self._probes())
        change = now_.loss - known.loss if known and now_ else None
        if change is not None and abs(change) > SAME:
            log.warning("the loaded weights differ from the saved ones: %+.2e nats per token on a kept text", change)
        found = Receipt(step=manifest.step, state=manifest.state, groups=manifest.groups, loss_change=change, at=now_iso())
        log.info("resumed: %s", found.model_dump_json())
        return found

    async def _probes(self) -> list[Probe]:
        """What the sampler says of the kept texts; nothing when it does not answer."""
        sampler = self.policy.sampler
        if sampler is None:
            return []
        try:
            async with asyncio.timeout(ASK_S):
                questions = (sampler.compute_logprobs_async(tinker.ModelInput.from_ints(text)) for text in self._texts)
                answers = await asyncio.gather(*questions)
        except Exception as error:  # a look at the weights is not worth a checkpoint
            log.warning("the checkpoint has no text to compare with: %r", error)
            return []
        return [
            Probe(tokens=text, logprobs=[float(value or 0.0) for value in answer[1:]])
            for text, answer in zip(self._texts, answers, strict=True)
        ]

    async def _remove(self, manifest: Manifest) -> None:
        self.checkpoints.remove_manifest(manifest)
        await self.policy.discard((manifest.state, manifest.sampler_weights), ASK_S)


def _reference(probes: list[Probe]) -> ReferenceLoss | None:
    return ReferenceLoss(tokens=probes[0].tokens, loss=-float(np.mean(probes[0].logprobs))) if probes else None
