"""Check that environments sample from the weights that are trained.

The log-probabilities of one fixed text are computed by the sampler of the published version and by
the model in training. They must agree, and when training has moved them measurably, the sampler's
must have moved too; otherwise the run fails, because it would learn from samples of another model.
No change is required after a single update: at a small learning rate there may be none.
"""

import asyncio
import itertools
import logging
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import tinker

from lachesis.base.errors import ServerProtocolError, WeightSyncError
from lachesis.trainer.rollout_client import ScoredGroup
from lachesis.trainer.trained_model import Policy
from lachesis.weight_agreement.logprob_gap import BFLOAT16_TOLERANCE

log = logging.getLogger(__name__)
MAX_TEXT_TOKENS = 64
# Number of texts of the first batch that are kept to compare checkpoints with.
NUM_PROBE_TEXTS = 4
# Training must have moved the text by this many nats per token before the sampler is compared.
#
# It is larger than the effect of rounding to bfloat16 on either side.
MIN_MEASURABLE_CHANGE = 0.02
# The sampler must have moved by at least this share of the movement in training.
MIN_FOLLOWED_SHARE = 0.1
# The two sides may differ by this many times their difference before training.
#
# The usual limit applies if it is larger.
MAX_GAP_GROWTH = 3.0
# Maximum number of updates between two checks; the first checks are after 1, 2, 4, 8, 16 and 32.
MAX_UPDATES_BETWEEN_CHECKS = 32
COMPARE_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class WeightSample:
    """Hold both sides' log-probabilities, in nats, of each token but the first."""

    sampler_logprobs: np.ndarray
    trainer_logprobs: np.ndarray

    def measure_gap(self) -> float:
        """Return the mean difference of the two sides in nats per token."""
        return _mean_abs_difference(self.sampler_logprobs, self.trainer_logprobs)

    def measure_change(self, earlier: "WeightSample") -> tuple[float, float]:
        """Return by how many nats per token the trainer and the sampler have moved."""
        return _mean_abs_difference(
            self.trainer_logprobs, earlier.trainer_logprobs
        ), _mean_abs_difference(self.sampler_logprobs, earlier.sampler_logprobs)


class WeightSyncCheck:
    """Compare the weights after some updates, and measure their change beside training."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self._text_tokens: list[int] | None = None
        # The last sample that showed the sampler following, or the first one.
        self._reference: WeightSample | None = None
        # Maximum difference of sampler and trainer in nats per token.
        self._max_gap = BFLOAT16_TOLERANCE.limit
        self._num_updates = 0
        self._next_check = 1
        self._last_sampler_logprobs: np.ndarray | None = None
        self._sampler_task: asyncio.Task[list[float | None]] | None = None

    async def take_reference(self, tokens: Iterable[int]) -> None:
        """Sample the weights before the first update of this process.

        Raises:
            WeightSyncError: The two sides differ already.
        """
        if self._reference is None and self._ensure_text(tokens):
            sample = await self._sample_with_retry()
            if sample is not None:
                # A server that samples in lower precision than it trains has a gap from the start.
                self._max_gap = max(self._max_gap, MAX_GAP_GROWTH * sample.measure_gap())
                self._reference, self._last_sampler_logprobs = sample, sample.sampler_logprobs

    async def check(self) -> float | None:
        """Compare sampler and trainer if a check is due; call this after each update and its
        publication.

        Returns:
            The mean difference in nats per token, or None if they were not compared.

        Raises:
            WeightSyncError: The sampler does not have the weights in training.
        """
        self._num_updates += 1
        if self._reference is None or self._num_updates < self._next_check:
            return None
        sample = await self._sample_with_retry()
        if sample is None:
            return None  # The check is repeated after the next update.
        self._schedule_next_check()
        trainer_change, sampler_change = sample.measure_change(self._reference)
        log.info(
            "weights after %d updates: a token's log-probability has moved by %.2g in training and "
            "by %.2g in sampling; the two differ by %.2g",
            self._num_updates,
            trainer_change,
            sampler_change,
            sample.measure_gap(),
        )
        # Small changes add up against the same reference until they are measurable.
        if trainer_change >= MIN_MEASURABLE_CHANGE:
            self._reference = sample
        return sample.measure_gap()

    def _schedule_next_check(self) -> None:
        # Checks become rarer, because a fault of the server shows at the first updates.
        self._next_check = self._num_updates + min(self._num_updates, MAX_UPDATES_BETWEEN_CHECKS)

    async def _sample_with_retry(self) -> WeightSample | None:
        """Sample both sides, and again if they disagree; return None if one does not respond.

        A server that computes a text in another batch rounds differently, so a single sample may
        disagree.

        Raises:
            WeightSyncError: The second sample disagrees too.
        """
        sample = await self._sample_weights()
        if sample is None or (fault := self._find_fault(sample)) is None:
            return sample
        log.warning("%s; both sides are compared once more", fault)
        sample = await self._sample_weights()
        if sample is not None and (fault := self._find_fault(sample)) is not None:
            raise WeightSyncError(fault)
        return sample

    def _find_fault(self, sample: WeightSample) -> str | None:
        """Describe how a sample shows other weights than those in training, or return None."""
        trainer_change, sampler_change = (
            sample.measure_change(self._reference) if self._reference else (0.0, 0.0)
        )
        if (
            trainer_change >= MIN_MEASURABLE_CHANGE
            and sampler_change < MIN_FOLLOWED_SHARE * trainer_change
        ):
            return (
                "the weights that environments sample from do not follow training: after "
                f"{self._num_updates} updates training has moved the log-probabilities of a text "
                f"by {trainer_change:.3g} nats per token, the sampler by {sampler_change:.3g}"
            )
        if not sample.measure_gap() <= self._max_gap:  # This is true for NaN too.
            return (
                "the weights that environments sample from are not those in training: "
                f"the log-probabilities of a text differ by {sample.measure_gap():.3g} nats per "
                f"token on average; allowed: {self._max_gap:.3g}"
            )
        return None

    async def _sample_weights(self) -> WeightSample | None:
        """Sample both sides, or return None if one does not respond."""
        assert self.policy.sampler is not None
        assert self._text_tokens is not None
        prompt = tinker.ModelInput.from_ints(self._text_tokens)
        try:
            async with asyncio.timeout(COMPARE_TIMEOUT_S):
                sampler_logprobs, trainer_logprobs = await asyncio.gather(
                    self.policy.request_logprobs(self.policy.sampler, prompt),
                    self.policy.compute_logprobs(self._text_tokens),
                )
            return WeightSample(np.asarray(sampler_logprobs[1:], np.float64), trainer_logprobs)
        except ServerProtocolError:
            raise
        except Exception as error:  # A failed comparison must not end the run.
            log.warning("the published weights were not compared with those in training: %r", error)
            return None

    def start_change_measurement(self, tokens: Iterable[int]) -> None:
        """Start to measure the new version with the first text of two tokens or more."""
        if (
            self._ensure_text(tokens)
            and self._sampler_task is None
            and self.policy.sampler is not None
        ):
            prompt = tinker.ModelInput.from_ints(self._text_tokens)
            self._sampler_task = asyncio.ensure_future(
                self.policy.request_logprobs(self.policy.sampler, prompt)
            )

    async def finish_change_measurement(self) -> float | None:
        """Return the mean absolute change of a token's log-probability between the last two
        versions, in nats.

        None if there is nothing to compare, or the server did not respond.
        """
        if self._sampler_task is None:
            return None
        task, self._sampler_task = self._sampler_task, None
        try:
            logprobs = np.asarray((await asyncio.wait_for(task, 30))[1:], dtype=np.float64)
            last_logprobs, self._last_sampler_logprobs = self._last_sampler_logprobs, logprobs
            if last_logprobs is None:
                return None
            return _mean_abs_difference(logprobs, last_logprobs)
        except Exception as error:  # A failed measurement must not end the run.
            log.warning("the change of the published weights was not measured: %r", error)
            return None

    def close(self) -> None:
        """Cancel the last measurement."""
        if self._sampler_task is not None:
            self._sampler_task.cancel()

    def _ensure_text(self, tokens: Iterable[int]) -> bool:
        """Keep the first text of at least two tokens, and return whether such a text is kept."""
        if self._text_tokens is None:
            text_tokens = [int(token) for token in itertools.islice(tokens, MAX_TEXT_TOKENS)]
            self._text_tokens = text_tokens if len(text_tokens) > 1 else None
        return self._text_tokens is not None


def _mean_abs_difference(first: np.ndarray, second: np.ndarray) -> float:
    return float(np.abs(first - second).mean())


def select_probe_tokens(groups: list[ScoredGroup]) -> list[list[int]]:
    """Return the beginnings of one rollout each of a few groups."""
    return [
        [int(token) for token in group["tokens"][0][:MAX_TEXT_TOKENS]]
        for group in groups[:NUM_PROBE_TEXTS]
        if group["tokens"]
    ]
