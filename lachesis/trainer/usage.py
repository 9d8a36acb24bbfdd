"""What the inference server has been asked, and which weights each answer came from."""

from __future__ import annotations

import contextlib
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from lachesis.prices import Tokens
from lachesis.trainer.batch import pieces

MOST_SEQUENCES = 65_536
KEY_TOKENS = 8
Json = dict[str, Any]


class Usage:
    """Counts since the start of this process. Evaluations of the base model count as well: they are paid too."""

    def __init__(self) -> None:
        self.prefill = self.sampled = self.trained = 0
        self.requests = self.failed = self.completions = self.truncated = 0
        self.version = 0
        """How often weights were published; what is sampled now comes from this version."""
        self._under_way: dict[int, float] = {}
        self._sampled: OrderedDict[int, tuple[int, bool]] = OrderedDict()

    def tokens(self) -> Tokens:
        return Tokens(prefill=self.prefill, sampled=self.sampled, trained=self.trained)

    @contextlib.contextmanager
    def request(self, prompt: Sequence[int]) -> Iterator[None]:
        """One request for samples; the prompt counts once."""
        mark = object()
        self._under_way[id(mark)] = time.time()
        try:
            yield
            self.requests += 1
            self.prefill += len(prompt)
        except BaseException:
            self.failed += 1
            raise
        finally:
            del self._under_way[id(mark)]

    def sampled_sequence(self, tokens: Sequence[int], logprobs: Sequence[float], stop_reason: str, version: int) -> None:
        """Count one completion, and keep which weights it came from, and whether the limit cut it, until it is trained on."""
        self.completions += 1
        self.sampled += len(tokens)
        self.truncated += stop_reason == "length"
        self._sampled[_key(tokens, logprobs)] = (version, stop_reason == "length")
        if len(self._sampled) > MOST_SEQUENCES:
            self._sampled.popitem(last=False)

    def staleness(self, tokens: Sequence[int], logprobs: Sequence[float]) -> int | None:
        """How many updates ago the weights were made that sampled this; None when it did not come from here token by token."""
        known = self._sampled.get(_key(tokens, logprobs))
        return None if known is None else self.version - known[0]

    def was_cut(self, tokens: Sequence[int], logprobs: Sequence[float]) -> bool:
        """Whether the length limit cut this completion; false when it did not come from here token by token."""
        known = self._sampled.get(_key(tokens, logprobs))
        return known is not None and known[1]

    def report(self) -> Json:
        """For the health of the server. `request_since` is when the oldest request under way began (seconds since 1970)."""
        counts = {name: getattr(self, name) for name in ("requests", "failed", "completions", "truncated", "version")}
        return {**counts, "in_request": len(self._under_way), "request_since": min(self._under_way.values(), default=None)}


def _key(tokens: Sequence[int], logprobs: Sequence[float]) -> int:
    """The log-probabilities come back from the environment digit by digit, and tell two samplings of one text apart."""
    return hash((tuple(tokens[:KEY_TOKENS]), tuple(logprobs[:KEY_TOKENS])))


def rollout_metrics(groups_P: Sequence[Mapping[str, Any]], usage: Usage) -> dict[str, float]:
    """Of a batch as it came, also of groups that carry no gradient:

    entropy/sampling   -mean of the sampling log-probabilities, in nats per token: the entropy of the policy, estimated on its
    own
                       samples, as E[-log p(x)] with x from p is the entropy of p
    length/mean        sampled tokens per rollout
    staleness/*        updates between the weights that sampled a rollout and those it is trained on
    """
    logprobs: list[float] = []
    lengths: list[int] = []
    ages: list[int] = []
    for group in groups_P:
        for index, mask in enumerate(group.get("masks") or ()):
            trained_T = np.asarray(mask) != -100
            lengths.append(int(trained_T.sum()))
            if group.get("inference_logprobs"):
                logprobs_T = group["inference_logprobs"][index]
                if len(logprobs_T) == len(trained_T):
                    logprobs += [value for value, trained in zip(logprobs_T, trained_T, strict=True) if trained]
                    ages += _ages(group["tokens"][index], logprobs_T, trained_T, usage)
    found: dict[str, float] = {}
    if lengths:
        found |= {"length/mean": float(np.mean(lengths)), "length/max": float(max(lengths))}
    if logprobs:
        found["entropy/sampling"] = -float(np.mean(logprobs))
    if ages:
        found |= {"staleness/mean": float(np.mean(ages)), "staleness/max": float(max(ages))}
    return found


def _ages(tokens_T: Sequence[int], logprobs_T: Sequence[float], trained_T: Any, usage: Usage) -> list[int]:
    """The staleness of each of a rollout's sampled pieces that is known."""
    found = []
    for start, end in pieces(trained_T):
        age = usage.staleness(list(tokens_T[start:end]), list(logprobs_T[start:end]))
        if age is not None:
            found.append(age)
    return found
