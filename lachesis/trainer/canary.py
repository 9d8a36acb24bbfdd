"""Whether what environments sample from really changes: the log-probabilities of one fixed text under each published
version."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Iterable

import numpy as np
import tinker

from lachesis.trainer.policy import Policy

log = logging.getLogger(__name__)
MOST_TOKENS = 64


class Canary:
    """Asks beside training: the answer about one version is there when the next step is done."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self._text: list[int] | None = None
        self._last: np.ndarray | None = None
        self._asked: asyncio.Task[list[float | None]] | None = None

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
