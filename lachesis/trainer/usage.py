"""What the inference server has been asked, and which weights each answer came from."""

from __future__ import annotations

import contextlib
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any

from lachesis.base.json_text import Json
from lachesis.config.prices import TokenCounts
from lachesis.rollout_api.scored_group import find_sampled_spans

MAX_SEQUENCES = 65_536


class Usage:
    """Counts since the start of this process. Evaluations of the base model count as well: they are
    paid too.
    """

    def __init__(self) -> None:
        self.prefill = self.sampled = self.trained = 0
        self.requests = self.failed = self.completions = self.truncated = 0
        self.version = 0
        """How often weights were published; what is sampled now comes from this version."""
        self._request_starts: dict[int, float] = {}
        self._sampled_sequences: OrderedDict[int, tuple[int, bool]] = OrderedDict()

    def count_tokens(self) -> TokenCounts:
        return TokenCounts(prefill=self.prefill, sampled=self.sampled, trained=self.trained)

    @contextlib.contextmanager
    def track_request(self, prompt: Sequence[int]) -> Iterator[None]:
        """One request for samples; the prompt counts once."""
        request_key = object()
        self._request_starts[id(request_key)] = time.time()
        try:
            yield
            self.requests += 1
            self.prefill += len(prompt)
        except BaseException:
            self.failed += 1
            raise
        finally:
            del self._request_starts[id(request_key)]

    def record_sequence(
        self, tokens: Sequence[int], logprobs: Sequence[float], stop_reason: str, version: int
    ) -> None:
        """Count one completion, and keep which weights it came from, and whether the limit cut it,
        until it is trained on.
        """
        self.completions += 1
        self.sampled += len(tokens)
        self.truncated += stop_reason == "length"
        self._sampled_sequences[_hash_sequence(tokens, logprobs)] = (
            version,
            stop_reason == "length",
        )
        if len(self._sampled_sequences) > MAX_SEQUENCES:
            self._sampled_sequences.popitem(last=False)

    def record_evaluation_tokens(self, prompt_tokens: int, sampled_tokens: int) -> None:
        """Count the tokens of one answered request of an evaluation during training.

        They are paid for like all others. Requests, completions and those that the limit cut stay
        what training itself has asked for.
        """
        self.prefill += prompt_tokens
        self.sampled += sampled_tokens

    def find_staleness(self, tokens: Sequence[int], logprobs: Sequence[float]) -> int | None:
        """How many updates ago the weights were made that sampled this; None when it did not come
        from here token by token.
        """
        sampled_sequence = self._sampled_sequences.get(_hash_sequence(tokens, logprobs))
        return None if sampled_sequence is None else self.version - sampled_sequence[0]

    def was_truncated(self, tokens: Sequence[int], logprobs: Sequence[float]) -> bool:
        """Whether the length limit cut this completion; false when it did not come from here token
        by token.
        """
        sampled_sequence = self._sampled_sequences.get(_hash_sequence(tokens, logprobs))
        return sampled_sequence is not None and sampled_sequence[1]

    def to_json(self) -> Json:
        """For the health of the server. `request_since` is when the oldest request under way began
        (seconds since 1970).
        """
        counts = {
            name: getattr(self, name)
            for name in ("requests", "failed", "completions", "truncated", "version")
        }
        return {
            **counts,
            "in_request": len(self._request_starts),
            "request_since": min(self._request_starts.values(), default=None),
        }


def _hash_sequence(tokens: Sequence[int], logprobs: Sequence[float]) -> int:
    """Return the key of a completion, which is over all of its tokens: many answers begin alike.

    The log-probabilities come back from the environment digit by digit, and tell two samplings of
    one text apart.
    """
    return hash((tuple(tokens), tuple(logprobs)))


def find_span_staleness(
    tokens_T: Any, logprobs_T: Any, loss_mask_T: Any, usage: Usage
) -> list[int]:
    """Return the staleness of each of a rollout's sampled pieces that is known."""
    staleness_values = []
    for start, end in find_sampled_spans(loss_mask_T):
        staleness = usage.find_staleness(
            tokens_T[start:end].tolist(), logprobs_T[start:end].tolist()
        )
        if staleness is not None:
            staleness_values.append(staleness)
    return staleness_values
