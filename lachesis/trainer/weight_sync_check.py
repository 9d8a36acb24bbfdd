"""Check that environments sample from the weights that are trained.

One fixed text is asked of both sides, the sampler of the published version and the model in
training. Their log-probabilities of it must agree, and when training has moved them measurably, the
sampler's must have moved too; else the run fails, as it would learn from samples of another model.
No change is demanded of a single update: at a small learning rate there may be none.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import tinker

from lachesis.base.errors import WeightSyncError
from lachesis.base.tolerance import BFLOAT16_TOLERANCE
from lachesis.trainer.policy import Policy

log = logging.getLogger(__name__)
MAX_TEXT_TOKENS = 64
MIN_MEASURABLE_CHANGE = 0.02
"""Nats per token that training must have moved the text by before the sampler is expected to have
moved: above what rounding to bfloat16 does to either side.
"""
MIN_FOLLOWED_SHARE = 0.1
"""The share of that movement by which the sampler must have moved."""
MAX_GAP_GROWTH = 3.0
"""The two sides may later differ by so many times their difference before training.

The usual limit counts where it is larger.
"""
MAX_UPDATES_BETWEEN_CHECKS = 32
"""Updates between two checks. The first ones come after 1, 2, 4, 8, 16 and 32 updates."""
COMPARE_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class WeightSample:
    """What both sides give for each token of the text but the first, in nats."""

    sampler_logprobs: np.ndarray
    trainer_logprobs: np.ndarray

    def measure_gap(self) -> float:
        return _mean_abs_difference(self.sampler_logprobs, self.trainer_logprobs)

    def measure_change(self, earlier: WeightSample) -> tuple[float, float]:
        """Return by how many nats per token the trainer and the sampler have moved."""
        return _mean_abs_difference(
            self.trainer_logprobs, earlier.trainer_logprobs
        ), _mean_abs_difference(self.sampler_logprobs, earlier.sampler_logprobs)


class WeightSyncCheck:
    """Looks at the weights after some updates (`check`), and beside training after each (`ask` and
    `change`).
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self._text_tokens: list[int] | None = None
        self._reference: WeightSample | None = None
        """The last look at which the sampler was seen to follow, or the first one."""
        self._max_gap = BFLOAT16_TOLERANCE.limit
        """By how many nats per token sampler and trainer may differ."""
        self._num_updates = 0
        self._next_check = 1
        self._last_sampler_logprobs: np.ndarray | None = None
        self._sampler_task: asyncio.Task[list[float | None]] | None = None

    async def take_reference(self, tokens: Iterable[int]) -> None:
        """Look at the version that no update of this process has made. Raises CanaryError."""
        if self._reference is None and self._ensure_text(tokens):
            sample = await self._sample_with_retry()
            if sample is not None:
                self._max_gap = max(self._max_gap, MAX_GAP_GROWTH * sample.measure_gap())
                self._reference, self._last_sampler_logprobs = sample, sample.sampler_logprobs

    async def check(self) -> float | None:
        """Compare sampler and trainer, if it is time for it; call after each update and its
        publication.

        Returns:
            By how many nats per token the two differ on average; None if they were not compared.

        Raises:
            CanaryError: The sampler does not have the weights in training.
        """
        self._num_updates += 1
        if self._reference is None or self._num_updates < self._next_check:
            return None
        sample = await self._sample_with_retry()
        if sample is None:
            return None  # the next update is another chance
        self._next_check = self._num_updates + min(self._num_updates, MAX_UPDATES_BETWEEN_CHECKS)
        trainer_change, sampler_change = sample.measure_change(self._reference)
        log.info(
            "weights after %d updates: a token's log-probability has moved by %.2g in training and by %.2g in sampling; "
            "the two differ by %.2g",
            self._num_updates,
            trainer_change,
            sampler_change,
            sample.measure_gap(),
        )
        if trainer_change >= MIN_MEASURABLE_CHANGE:
            self._reference = sample
        return sample.measure_gap()

    async def _sample_with_retry(self) -> WeightSample | None:
        """Ask both sides, and once more where they disagree; None when one does not answer.

        A server that computes a text in another batch rounds otherwise, so that one look alone may
        disagree. Raises CanaryError if the second look disagrees too.
        """
        sample = await self._sample_weights()
        if sample is None or (fault := self._find_fault(sample)) is None:
            return sample
        log.warning("%s; both sides are asked once more", fault)
        sample = await self._sample_weights()
        if sample is not None and (fault := self._find_fault(sample)) is not None:
            raise WeightSyncError(fault)
        return sample

    def _find_fault(self, sample: WeightSample) -> str | None:
        """Return how a look shows that the sampler has not the weights in training, or None."""
        trainer_change, sampler_change = (
            sample.measure_change(self._reference) if self._reference else (0.0, 0.0)
        )
        if (
            trainer_change >= MIN_MEASURABLE_CHANGE
            and sampler_change < MIN_FOLLOWED_SHARE * trainer_change
        ):
            return (
                f"the weights that environments sample from do not follow training: after {self._num_updates} updates training "
                f"has moved the log-probabilities of a text by {trainer_change:.3g} nats per token, the sampler by {sampler_change:.3g}"
            )
        if not sample.measure_gap() <= self._max_gap:  # also where it is not a number
            return (
                "the weights that environments sample from are not those in training: "
                f"the log-probabilities of a text differ by {sample.measure_gap():.3g} nats per token "
                f"on average; allowed: {self._max_gap:.3g}"
            )
        return None

    async def _sample_weights(self) -> WeightSample | None:
        """Ask both sides; None when one does not answer."""
        assert self.policy.sampler is not None
        assert self._text_tokens is not None
        prompt = tinker.ModelInput.from_ints(self._text_tokens)
        try:
            async with asyncio.timeout(COMPARE_TIMEOUT_S):
                sampler_logprobs, trainer_logprobs = await asyncio.gather(
                    _compute_logprobs(self.policy.sampler, prompt),
                    self.policy.compute_logprobs(self._text_tokens),
                )
            return WeightSample(np.asarray(sampler_logprobs[1:], np.float64), trainer_logprobs)
        except Exception as error:  # a look at the weights is not worth a run
            log.warning("the published weights were not compared with those in training: %r", error)
            return None

    def start_change_measurement(self, tokens: Iterable[int]) -> None:
        """Look at the version that was just published. The first text of at least two tokens that
        is given stays.
        """
        if (
            self._ensure_text(tokens)
            and self._sampler_task is None
            and self.policy.sampler is not None
        ):
            prompt = tinker.ModelInput.from_ints(self._text_tokens)
            self._sampler_task = asyncio.ensure_future(
                _compute_logprobs(self.policy.sampler, prompt)
            )

    async def finish_change_measurement(self) -> float | None:
        """Mean absolute change of a token's log-probability, in nats, between the last two versions
        looked at; None when there is nothing to compare yet, or the server did not answer.
        """
        if self._sampler_task is None:
            return None
        task, self._sampler_task = self._sampler_task, None
        try:
            logprobs = np.asarray((await asyncio.wait_for(task, 30))[1:], dtype=np.float64)
            last_logprobs, self._last_sampler_logprobs = self._last_sampler_logprobs, logprobs
            return None if last_logprobs is None else _mean_abs_difference(logprobs, last_logprobs)
        except Exception as error:  # a look at the weights is not worth a run
            log.warning("the published weights were not looked at: %r", error)
            return None

    def close(self) -> None:
        """Give up the look beside training that was asked for last."""
        if self._sampler_task is not None:
            self._sampler_task.cancel()

    def _ensure_text(self, tokens: Iterable[int]) -> bool:
        """Keep the text unless there is one already, and return whether there is one. A single
        token predicts nothing.
        """
        if self._text_tokens is None:
            text_tokens = [int(token) for token in itertools.islice(tokens, MAX_TEXT_TOKENS)]
            self._text_tokens = text_tokens if len(text_tokens) > 1 else None
        return self._text_tokens is not None


def _mean_abs_difference(first: np.ndarray, second: np.ndarray) -> float:
    return float(np.abs(first - second).mean())


async def _compute_logprobs(
    sampler: tinker.SamplingClient, prompt: tinker.ModelInput
) -> list[float | None]:
    return list(await sampler.compute_logprobs_async(prompt))
