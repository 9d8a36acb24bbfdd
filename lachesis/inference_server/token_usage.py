"""Count the requests to the inference server, and remember which weights each answer came from."""

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
    """Count usage since the start of this process, including evaluations of the base model."""

    def __init__(self) -> None:
        self.prefill = self.sampled = self.trained = 0
        self.requests = self.failed = self.completions = self.truncated = 0
        # How often weights were published; current samples come from this version.
        self.version = 0
        self._request_starts: dict[int, float] = {}
        self._sampled_sequences: OrderedDict[int, tuple[int, bool]] = OrderedDict()

    def count_tokens(self) -> TokenCounts:
        """Return the tokens by the way they are priced."""
        return TokenCounts(prefill=self.prefill, sampled=self.sampled, trained=self.trained)

    @contextlib.contextmanager
    def track_request(self, prompt: Sequence[int]) -> Iterator[None]:
        """Count one sampling request during the block; its prompt counts once."""
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
        """Count a completion, and remember its weights and truncation until it is trained on."""
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
        """Count the tokens of one request of an evaluation during training.

        They are paid for like all others, but the counts of requests, completions and truncations
        stay those of training.
        """
        self.prefill += prompt_tokens
        self.sampled += sampled_tokens

    def record_logprob_request(self, num_tokens: int) -> None:
        """Count the tokens of a request for log-probabilities.

        Servers sample one token after the text, which is paid for and not used.
        """
        self.prefill += num_tokens
        self.sampled += 1

    def find_staleness(self, tokens: Sequence[int], logprobs: Sequence[float]) -> int | None:
        """Return how many updates ago an unchanged sequence was sampled here, or None."""
        version = self.find_version(tokens, logprobs)
        if version is None:
            return None
        return self.version - version

    def find_version(self, tokens: Sequence[int], logprobs: Sequence[float]) -> int | None:
        """Return the weights' version that sampled an unchanged sequence here, or None."""
        sampled_sequence = self._sampled_sequences.get(_hash_sequence(tokens, logprobs))
        if sampled_sequence is None:
            return None
        return sampled_sequence[0]

    def was_truncated(self, tokens: Sequence[int], logprobs: Sequence[float]) -> bool:
        """Return whether the length limit truncated an unchanged sequence of this server."""
        sampled_sequence = self._sampled_sequences.get(_hash_sequence(tokens, logprobs))
        return sampled_sequence is not None and sampled_sequence[1]

    def to_json(self) -> Json:
        """Return the counts for the server's health route.

        `request_since` is when the oldest request in progress began, in seconds since the epoch.
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
    """Return the key of a completion, over all of its tokens, because many answers begin alike.

    The environment returns the log-probabilities digit by digit, and they distinguish two samplings
    of the same text.
    """
    return hash((tuple(tokens), tuple(logprobs)))


def find_span_staleness(
    tokens_T: Any, logprobs_T: Any, loss_mask_T: Any, usage: Usage
) -> list[int]:
    """Return the known staleness values of a rollout's sampled spans."""
    staleness_values = []
    for start, end in find_sampled_spans(loss_mask_T):
        staleness = usage.find_staleness(
            tokens_T[start:end].tolist(), logprobs_T[start:end].tolist()
        )
        if staleness is not None:
            staleness_values.append(staleness)
    return staleness_values
