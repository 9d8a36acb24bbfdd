"""Whether what environments sample from is what was trained: the log-probabilities of one fixed text under each published
version.

After the first update they must have changed, and must be those of the model in training, else the run fails: it would learn
from samples of another model. After that their change is a metric.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Iterable

import numpy as np
import tinker

from lachesis.errors import CanaryError
from lachesis.trainer.policy import Policy

log = logging.getLogger(__name__)
MOST_TOKENS = 64
MOST_APART = 0.05
"""Nats per token between sampler and trainer; one engine differs by 1e-6, two in bfloat16 by some 1e-2."""


class Canary:
    """Asks beside training: the answer about one version is there when the next step is done."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self._text: list[int] | None = None
        self._last: np.ndarray | None = None
        self._asked: asyncio.Task[list[float | None]] | None = None

    async def before(self, tokens: Iterable[int]) -> None:
        """Look at the version that no update has made yet, once."""
        if self._last is None and self.policy.sampler is not None:
            self._text = [int(token) for token in itertools.islice(tokens, MOST_TOKENS)]
            self._last = await self._look()

    async def check(self) -> None:
        """After the first update and its publication. Raises CanaryError."""
        before, self._last = self._last, await self._look()
        trained = await self.policy.logprobs(self._text or [])
        if before is None or self._last is None or not len(trained):
            return
        change, apart = float(np.abs(self._last - before).max()), float(np.abs(self._last - trained).mean())
        log.info(
            "canary: the first update has moved a log-probability by up to %.2g; sampler and trainer differ by %.2g",
            change,
            apart,
        )
        if change == 0:
            raise CanaryError(
                "the weights that environments sample from did not change with the first update: the log-probabilities of a "
                "text are the same, digit for digit; the server's sampler does not follow its trainer"
            )
        if not apart <= MOST_APART:
            raise CanaryError(
                "the weights that environments sample from are not those in training: the log-probabilities of a text differ "
                f"by {apart:.3g} nats per token on average; allowed: {MOST_APART}"
            )

    async def _look(self) -> np.ndarray | None:
        assert self.policy.sampler is not None
        if self._text is None or len(self._text) < 2:
            return None
        found = await _ask(self.policy.sampler, tinker.ModelInput.from_ints(self._text))
        return np.asarray(found[1:], np.float64)

    def ask(self, tokens: Iterable[int]) -> None:
        """Look at the version that was just published. The first text that is given stays."""
        if self._text is None:
            self._text = [int(token) for token in itertools.islice(tokens, MOST_TOKENS)]
        if self._asked is None and self.policy.sampler is not None and len(self._text) > 1:
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
            return None if last is None else float(np.abs(values - last).mean())
        except Exception as error:  # a look at the weights is not worth a run
            log.warning("the published weights were not looked at: %r", error)
            return None


async def _ask(sampler: tinker.SamplingClient, prompt: tinker.ModelInput) -> list[float | None]:
    return list(await sampler.compute_logprobs_async(prompt))
