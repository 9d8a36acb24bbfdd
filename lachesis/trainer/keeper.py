"""Keeps a run's checkpoints: writes them, proves that training goes on from what was written, and deletes what nobody needs."""

from __future__ import annotations

import asyncio
import collections
import logging
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tinker
from pydantic import BaseModel, ConfigDict

from lachesis.runs import now
from lachesis.trainer.batch import environment_of
from lachesis.trainer.checkpoints import Checkpoints, Manifest, Probe, Reference
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
    several environments."""

    def __init__(self, policy: Policy, checkpoints: Checkpoints, *, keep: int, newest: Manifest | None) -> None:
        self.policy, self.checkpoints, self.keep = policy, checkpoints, keep
        self.checkpoints.folder.mkdir(exist_ok=True)
        self.checkpoints.set_aside(after=newest.step if newest else 0)
        self.step = newest.step if newest else 0
        self.warm = newest is not None and not newest.borrowed
        """Whether what comes before the first step, training on examples, is in the weights."""
        self.groups = newest.groups if newest else 0
        self.mixture = collections.Counter(newest.mixture if newest else {})
        self._texts = [probe.tokens for probe in newest.probes] if newest else []
        if newest and newest.reference and not self._texts:
            self._texts = [newest.reference.tokens]
        self._rewards: list[float] = []

    def receive(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Training has received these."""
        self.groups += len(groups)
        self.mixture.update(name for group in groups if (name := environment_of(group)))

    def note(self, reward: float, texts: list[list[int]]) -> None:
        """One step was made; the first `texts` are kept to compare checkpoints with."""
        self._rewards.append(reward)
        self._texts = self._texts or [text for text in texts if len(text) > 1]

    async def save(self, step: int, *, final: bool = False) -> None:
        """A checkpoint of this step, unless there is one; then those that are superseded go. Raises what the server or the disk
        says."""
        if step <= self.step and not (step == 0 and not self.warm):
            return
        self.warm = True
        paths = await self.policy.save(f"step-{step:06d}")
        reward = statistics.fmean(self._rewards) if self._rewards else None
        probes = await self._probes()
        manifest = Manifest(
            step=step,
            final=final,
            groups=self.groups,
            mixture=self.mixture,
            reward=reward,
            reference=_reference(probes),
            probes=probes,
            **paths,
        )
        await asyncio.to_thread(self.checkpoints.write, manifest)
        self.step, self._rewards = step, []
        for old in self.checkpoints.superseded(self.keep):
            await self._remove(old)

    async def receipt(self, manifest: Manifest) -> Receipt:
        """Compare the weights that were loaded with those that were saved, by what they say of a text; ask after publishing."""
        known, now_ = manifest.reference, _reference(await self._probes())
        change = now_.loss - known.loss if known and now_ else None
        if change is not None and abs(change) > SAME:
            log.warning("the loaded weights differ from the saved ones: %+.2e nats per token on a kept text", change)
        found = Receipt(step=manifest.step, state=manifest.state, groups=manifest.groups, loss_change=change, at=now())
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
        self.checkpoints.remove(manifest)
        try:
            async with asyncio.timeout(ASK_S):
                for path in (manifest.state, manifest.sampler_weights):
                    await self.policy.delete(path)
        except Exception as error:  # it costs space and nothing else
            log.warning("the files of the checkpoint of step %d are still there: %r", manifest.step, error)


def _reference(probes: list[Probe]) -> Reference | None:
    return Reference(tokens=probes[0].tokens, loss=-float(np.mean(probes[0].logprobs))) if probes else None
