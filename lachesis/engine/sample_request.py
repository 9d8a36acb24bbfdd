"""One request for samples, and what it asks about its prompt beside them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from lachesis.base.errors import EngineRequestError
from lachesis.engine.token_choice import Settings, choose

Array = np.ndarray[Any, Any]
Never: Callable[[], bool] = lambda: False  # noqa: E731
MOST_TOP_K = 1024
MOST_SAMPLES = 4096
POSITIONS_AT_ONCE = 2**24
"""Logits of a prompt that are made at a time, positions times vocabulary."""
TopK = tuple[Array, Array]
"""Token ids and log-probabilities, (positions, k), the likeliest first; 0 and -99999 where there is none."""
NOTHING = -99999.0


@dataclass(frozen=True)
class PromptQuestions:
    """What is asked about the distribution before each prompt token but the first. Log-probabilities are natural and at
    temperature 1; only the alternatives are drawn at the request's temperature."""

    logprobs: bool = False
    last_n: int | None = None
    """Only of so many tokens at the end."""
    top_k: int = 0
    targets: Array | None = None
    """(P - 1, K) token ids to score, -1 for none."""
    alternatives: int = 0
    """Tokens to draw at each position."""

    def __bool__(self) -> bool:
        return self.logprobs or self.top_k > 0 or self.targets is not None or self.alternatives > 0


@dataclass(frozen=True)
class SampleRequest:
    """`num_samples` continuations of `prompt`. The log-probability of a sampled token is that under the temperature-scaled
    distribution before top-p and top-k cut it; temperature 0 is greedy, with unscaled ones."""

    prompt: list[int]
    num_samples: int = 1
    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    seed: int | None = None
    stop_tokens: frozenset[int] = frozenset()
    stop_strings: tuple[str, ...] = ()
    top_k_logprobs: int = 0
    """The likeliest tokens at each sampled position."""
    questions: PromptQuestions = field(default_factory=PromptQuestions)
    cancelled: Callable[[], bool] = Never

    def check(self, context: int, vocabulary: int) -> None:
        """Raises EngineRequestError for a request that cannot be served, naming the limit."""
        if not self.prompt:
            raise EngineRequestError("the prompt is empty; at least one token is needed")
        if len(self.prompt) >= context:
            raise EngineRequestError(f"the prompt has {len(self.prompt)} tokens; the context holds {context}")
        if not 0 <= min(self.prompt) <= max(self.prompt) < vocabulary:
            raise EngineRequestError(f"the prompt has a token id outside the vocabulary (0 to {vocabulary - 1})")
        if not 1 <= self.num_samples <= MOST_SAMPLES or (self.max_tokens is not None and self.max_tokens < 1):
            raise EngineRequestError(
                f"num_samples is {self.num_samples} and max_tokens is {self.max_tokens}; both must be at least 1, and "
                f"num_samples at most {MOST_SAMPLES}"
            )
        if not 0 <= self.temperature < float("inf") or not 0 < self.top_p <= 1:
            raise EngineRequestError(
                f"temperature is {self.temperature}, top_p is {self.top_p}; allowed: temperature >= 0, 0 < top_p <= 1"
            )
        self._check_questions(vocabulary)

    def _check_questions(self, vocabulary: int) -> None:
        asked, last = self.questions, len(self.prompt) - 1
        for name, k in (
            ("topk_sample_logprobs", self.top_k_logprobs),
            ("topk_prompt_logprobs", asked.top_k),
            ("prompt_alt_tokens_k", asked.alternatives),
        ):
            most = MOST_TOP_K if name == "prompt_alt_tokens_k" else min(MOST_TOP_K, vocabulary)
            if not 0 <= k <= most:
                raise EngineRequestError(f"{name} is {k}; allowed: 0 to {most}")
        if asked.last_n is not None and not 1 <= asked.last_n <= last:
            raise EngineRequestError(f"prompt_logprobs_last_n is {asked.last_n}; allowed: 1 to {last} for this prompt")
        if asked.targets is not None:
            shape = asked.targets.shape
            if len(shape) != 2 or shape[0] != last or not 1 <= shape[1] <= MOST_TOP_K:
                raise EngineRequestError(f"target_prompt_logprobs has shape {shape}; allowed: ({last}, 1 to {MOST_TOP_K})")
            if asked.targets.min() < -1 or asked.targets.max() >= vocabulary or asked.targets.max() < 0:
                raise EngineRequestError(
                    f"target_prompt_logprobs has a token id outside the vocabulary (0 to {vocabulary - 1}; -1 for none), "
                    "or none at all"
                )


@dataclass
class PromptAnswers:
    """Of a prompt of P tokens; the first token has no distribution before it."""

    logprobs: Array | None = None
    """(P,) with NaN where nothing was asked."""
    top_k: TopK | None = None
    """(P, k)."""
    targets: Array | None = None
    """(P - 1, K), 0 where the question was -1."""
    alternatives: tuple[Array, Array] | None = None
    """Token ids and log-probabilities, (P - 1, k)."""


@dataclass
class Continuation:
    """One sample; `stopped` by itself, else the limit has cut it."""

    tokens: list[int]
    logprobs: list[float]
    stopped: bool
    top_k: TopK | None = None


@dataclass
class Sampled:
    """What came of a request."""

    sequences: list[Continuation]
    prompt: PromptAnswers = field(default_factory=PromptAnswers)


def answer(
    request: SampleRequest, states: torch.Tensor, logits: Callable[[torch.Tensor], torch.Tensor], uniforms: Array
) -> PromptAnswers:
    """Answer a request's questions from the states (P, ·) of its prompt. `uniforms` (P - 1, alternatives) decide the draws."""
    asked, count = request.questions, len(request.prompt)
    found = PromptAnswers()
    first = 1 if asked.last_n is None else count - asked.last_n
    if asked.logprobs:
        found.logprobs = np.full(count, np.nan, np.float32)
    if asked.top_k:
        found.top_k = (np.zeros((count, asked.top_k), np.int32), np.full((count, asked.top_k), NOTHING, np.float32))
    if asked.targets is not None:
        found.targets = np.zeros(asked.targets.shape, np.float32)
    if asked.alternatives:
        shape = (count - 1, asked.alternatives)
        found.alternatives = (np.zeros(shape, np.int64), np.zeros(shape, np.float32))
    whole = asked.targets is not None or asked.alternatives > 0
    start = 1 if whole else first
    size = None
    while start < count:
        if size is None:
            size = max(1, POSITIONS_AT_ONCE // logits(states[:1]).shape[-1])
        end = min(count, start + size)
        _fill(found, request, logits(states[start - 1 : end - 1]), range(start, end), first, uniforms)
        start = end
    return found


def _fill(found: PromptAnswers, request: SampleRequest, raw: torch.Tensor, span: range, first: int, uniforms: Array) -> None:
    """The answers about the prompt's tokens in `span`, from the logits (len(span), V) before each."""
    asked = request.questions
    logprobs = torch.log_softmax(raw, -1)
    at, since = slice(span.start, span.stop), max(0, first - span.start)
    if found.logprobs is not None:
        tokens = torch.tensor(request.prompt[at], device=raw.device)[:, None]
        found.logprobs[at][since:] = logprobs.gather(1, tokens)[since:, 0].cpu().numpy()
    if found.top_k is not None:
        values, ids = logprobs.topk(asked.top_k, -1)
        found.top_k[0][at][since:] = ids[since:].cpu().numpy()
        found.top_k[1][at][since:] = values[since:].cpu().numpy()
    rows = slice(span.start - 1, span.stop - 1)
    if found.targets is not None and asked.targets is not None:
        wanted = torch.from_numpy(asked.targets[rows]).to(raw.device)
        values = logprobs.gather(1, wanted.clamp(min=0)).masked_fill(wanted < 0, 0.0)
        found.targets[rows] = values.cpu().numpy()
    if found.alternatives is not None:
        drawn = torch.from_numpy(uniforms[rows]).to(raw.device)
        one = torch.full((len(span),), request.temperature, device=raw.device)
        settings = Settings.of(one, torch.ones_like(one), torch.zeros_like(one).long())
        for column in range(asked.alternatives):
            tokens, _ = choose(raw, drawn[:, column], settings)
            found.alternatives[0][rows, column] = tokens.cpu().numpy()
            found.alternatives[1][rows, column] = logprobs.gather(1, tokens[:, None])[:, 0].cpu().numpy()


def top_k(logits: torch.Tensor, k: int) -> list[tuple[Sequence[int], Sequence[float]]]:
    """The k likeliest tokens of each row of logits (R, V), with their log-probabilities."""
    values, ids = torch.log_softmax(logits, -1).topk(k, -1)
    return list(zip(ids.tolist(), values.tolist(), strict=True))
