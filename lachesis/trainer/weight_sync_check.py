"""Check that environments sample from the weights that are trained.

One fixed text is asked of both sides, the sampler of the published version and the model in training. Their
log-probabilities of it must agree, and when training has moved them measurably, the sampler's must have moved too; else the run
fails, as it would learn from samples of another model. No change is demanded of a single update: at a small learning rate there
may be none.
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
MOST_TOKENS = 64
MEASURABLE = 0.02
"""Nats per token that training must have moved the text by before the sampler is expected to have moved: above what rounding to
bfloat16 does to either side."""
LEAST_FOLLOWED = 0.1
"""The share of that movement by which the sampler must have moved."""
MOST_GROWTH = 3.0
"""The two sides may later differ by so many times their difference before training.

The usual limit counts where it is larger.
"""
MOST_BETWEEN = 32
"""Updates between two checks. The first ones come after 1, 2, 4, 8, 16 and 32 updates."""
ASK_S = 120.0


@dataclass(frozen=True)
class Look:
    """What both sides give for each token of the text but the first, in nats."""

    sampler: np.ndarray
    trainer: np.ndarray

    def apart(self) -> float:
        return _distance(self.sampler, self.trainer)

    def change_since(self, earlier: Look) -> tuple[float, float]:
        """Return by how many nats per token the trainer and the sampler have moved."""
        return _distance(self.trainer, earlier.trainer), _distance(self.sampler, earlier.sampler)


class Canary:
    """Looks at the weights after some updates (`check`), and beside training after each (`ask` and `change`)."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self._text: list[int] | None = None
        self._reference: Look | None = None
        """The last look at which the sampler was seen to follow, or the first one."""
        self._limit = BFLOAT16_TOLERANCE.limit
        """By how many nats per token sampler and trainer may differ."""
        self._updates = 0
        self._next_check = 1
        self._last: np.ndarray | None = None
        self._asked: asyncio.Task[list[float | None]] | None = None

    async def before(self, tokens: Iterable[int]) -> None:
        """Look at the version that no update of this process has made. Raises CanaryError."""
        if self._reference is None and self._take_text(tokens):
            look = await self._look_again_if_wrong()
            if look is not None:
                self._limit = max(self._limit, MOST_GROWTH * look.apart())
                self._reference, self._last = look, look.sampler

    async def check(self) -> float | None:
        """Compare sampler and trainer, if it is time for it; call after each update and its publication.

        Returns:
            By how many nats per token the two differ on average; None if they were not compared.

        Raises:
            CanaryError: The sampler does not have the weights in training.
        """
        self._updates += 1
        if self._reference is None or self._updates < self._next_check:
            return None
        look = await self._look_again_if_wrong()
        if look is None:
            return None  # the next update is another chance
        self._next_check = self._updates + min(self._updates, MOST_BETWEEN)
        moved, followed = look.change_since(self._reference)
        log.info(
            "weights after %d updates: a token's log-probability has moved by %.2g in training and by %.2g in sampling; "
            "the two differ by %.2g",
            self._updates,
            moved,
            followed,
            look.apart(),
        )
        if moved >= MEASURABLE:
            self._reference = look
        return look.apart()

    async def _look_again_if_wrong(self) -> Look | None:
        """Ask both sides, and once more where they disagree; None when one does not answer.

        A server that computes a text in another batch rounds otherwise, so that one look alone may
        disagree. Raises CanaryError if the second look disagrees too.
        """
        look = await self._look()
        if look is None or (fault := self._find_fault(look)) is None:
            return look
        log.warning("%s; both sides are asked once more", fault)
        look = await self._look()
        if look is not None and (fault := self._find_fault(look)) is not None:
            raise WeightSyncError(fault)
        return look

    def _find_fault(self, look: Look) -> str | None:
        """Return how a look shows that the sampler has not the weights in training, or None."""
        moved, followed = look.change_since(self._reference) if self._reference else (0.0, 0.0)
        if moved >= MEASURABLE and followed < LEAST_FOLLOWED * moved:
            return (
                f"the weights that environments sample from do not follow training: after {self._updates} updates training "
                f"has moved the log-probabilities of a text by {moved:.3g} nats per token, the sampler by {followed:.3g}"
            )
        if not look.apart() <= self._limit:  # also where it is not a number
            return (
                "the weights that environments sample from are not those in training: "
                f"the log-probabilities of a text differ by {look.apart():.3g} nats per token "
                f"on average; allowed: {self._limit:.3g}"
            )
        return None

    async def _look(self) -> Look | None:
        """Ask both sides; None when one does not answer."""
        assert self.policy.sampler is not None
        assert self._text is not None
        prompt = tinker.ModelInput.from_ints(self._text)
        try:
            async with asyncio.timeout(ASK_S):
                sampled, trained = await asyncio.gather(_ask(self.policy.sampler, prompt), self.policy.logprobs(self._text))
            return Look(np.asarray(sampled[1:], np.float64), trained)
        except Exception as error:  # a look at the weights is not worth a run
            log.warning("the published weights were not compared with those in training: %r", error)
            return None

    def ask(self, tokens: Iterable[int]) -> None:
        """Look at the version that was just published. The first text of at least two tokens that is given stays."""
        if self._take_text(tokens) and self._asked is None and self.policy.sampler is not None:
            prompt = tinker.ModelInput.from_ints(self._text)
            self._asked = asyncio.ensure_future(_ask(self.policy.sampler, prompt))

    async def change(self) -> float | None:
        """Mean absolute change of a token's log-probability, in nats, between the last two versions looked at; None when there
        is nothing to compare yet, or the server did not answer."""
        if self._asked is None:
            return None
        task, self._asked = self._asked, None
        try:
            values = np.asarray((await asyncio.wait_for(task, 30))[1:], dtype=np.float64)
            last, self._last = self._last, values
            return None if last is None else _distance(values, last)
        except Exception as error:  # a look at the weights is not worth a run
            log.warning("the published weights were not looked at: %r", error)
            return None

    def close(self) -> None:
        """Give up the look beside training that was asked for last."""
        if self._asked is not None:
            self._asked.cancel()

    def _take_text(self, tokens: Iterable[int]) -> bool:
        """Keep the text unless there is one already, and return whether there is one. A single token predicts nothing."""
        if self._text is None:
            text = [int(token) for token in itertools.islice(tokens, MOST_TOKENS)]
            self._text = text if len(text) > 1 else None
        return self._text is not None


def _distance(one: np.ndarray, other: np.ndarray) -> float:
    return float(np.abs(one - other).mean())


async def _ask(sampler: tinker.SamplingClient, prompt: tinker.ModelInput) -> list[float | None]:
    return list(await sampler.compute_logprobs_async(prompt))
