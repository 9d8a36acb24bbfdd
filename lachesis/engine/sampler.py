"""Generate tokens for many requests at once, with a key-value cache; knows token ids, text only for stop strings.

Every request's prompt is prefilled once, left-padded into one batch; its cache rows are then repeated for its samples.
Rows that have ended, or whose client has gone, leave the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from transformers import DynamicCache

from lachesis.engine.model import SamplingModel
from lachesis.errors import EngineRequestError

Never: Callable[[], bool] = lambda: False  # noqa: E731


@dataclass(frozen=True)
class SampleRequest:
    """One request: `num_samples` continuations of `prompt`. The log-probability of a sampled token is that under the
    temperature-scaled distribution before top-p and top-k cut it; temperature 0 is greedy, with unscaled ones."""

    prompt: list[int]
    num_samples: int = 1
    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    seed: int | None = None
    stop_tokens: frozenset[int] = frozenset()
    stop_strings: tuple[str, ...] = ()
    prompt_logprobs: bool = False
    cancelled: Callable[[], bool] = Never


@dataclass
class Sampled:
    """What came of a request: per sample (tokens, logprobs, stopped by itself); prompt logprobs (P,), NaN first."""

    sequences: list[tuple[list[int], list[float], bool]]
    prompt_logprobs: np.ndarray | None = None


@dataclass
class _Row:
    request: SampleRequest
    uniforms: np.ndarray
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    stopped: bool = False
    done: bool = False


class Sampler:
    """Owns the random stream of requests that bring no seed. Only the model thread may call this."""

    def __init__(self, model: SamplingModel, seed: int | None = None) -> None:
        self.model = model
        self._random = np.random.default_rng(seed)

    def check(self, request: SampleRequest) -> None:
        """Raises EngineRequestError for a request that cannot be served, naming the limit."""
        context, vocabulary = self.model.base.context, self.model.base.vocabulary
        if not request.prompt:
            raise EngineRequestError("the prompt is empty; at least one token is needed")
        if len(request.prompt) >= context:
            raise EngineRequestError(f"the prompt has {len(request.prompt)} tokens; the context holds {context}")
        if not 0 <= min(request.prompt) <= max(request.prompt) < vocabulary:
            raise EngineRequestError(f"the prompt has a token id outside the vocabulary (0 to {vocabulary - 1})")
        if request.num_samples < 1 or (request.max_tokens is not None and request.max_tokens < 1):
            raise EngineRequestError(
                f"num_samples is {request.num_samples} and max_tokens is {request.max_tokens}; both must be at least 1"
            )
        if request.temperature < 0 or not 0 < request.top_p <= 1:
            raise EngineRequestError(
                f"temperature is {request.temperature}, top_p is {request.top_p}; allowed: temperature >= 0, 0 < top_p <= 1"
            )

    @torch.inference_mode()
    def generate(self, requests: list[SampleRequest]) -> list[Sampled]:
        """Serve checked requests as one batch on the weights that the model has now."""
        rows = [self._row(request, index) for request in requests for index in range(request.num_samples)]
        prefill = _Prefill(self.model, requests)
        _decode(prefill, rows, self._stop_text)
        results, start = [], 0
        for index, request in enumerate(requests):
            mine = rows[start : start + request.num_samples]
            start += request.num_samples
            sequences = [(row.tokens, row.logprobs, row.stopped) for row in mine]
            results.append(Sampled(sequences, prefill.prompt_logprobs(index) if request.prompt_logprobs else None))
        return results

    def _row(self, request: SampleRequest, index: int) -> _Row:
        room = self.model.base.context - len(request.prompt)
        length = min(room, request.max_tokens or room)
        random = self._random if request.seed is None else np.random.default_rng([abs(request.seed), index])
        return _Row(request, random.random(length))

    def _stop_text(self, row: _Row) -> bool:
        # A character takes at most 4 byte-level tokens, so this tail holds any stop string that has just been completed.
        tail = row.tokens[-(4 * max(map(len, row.request.stop_strings)) + 4) :]
        text = self.model.base.tokenizer.decode(tail)
        return any(stop in text for stop in row.request.stop_strings)


class _Prefill:
    """The prompts' cache and next-token logits, one row per request."""

    def __init__(self, model: SamplingModel, requests: list[SampleRequest]) -> None:
        self.model, self.requests = model, requests
        device = model.base.device
        self.width = max(len(request.prompt) for request in requests)
        ids = torch.zeros(len(requests), self.width, dtype=torch.long)
        self.mask = torch.zeros_like(ids)
        for row, request in enumerate(requests):
            ids[row, self.width - len(request.prompt) :] = torch.tensor(request.prompt)
            self.mask[row, self.width - len(request.prompt) :] = 1
        self.ids, self.mask = ids.to(device), self.mask.to(device)
        self.cache = DynamicCache(config=model.module.config)
        self._all = any(request.prompt_logprobs for request in requests)
        positions = (self.mask.cumsum(1) - 1).clamp(min=0)
        self.logits = step(model, self.ids, self.mask, positions, self.cache, every_position=self._all)

    def prompt_logprobs(self, row: int) -> np.ndarray:
        """(P,) natural logs at temperature 1; the first token has none (NaN)."""
        prompt = self.requests[row].prompt
        logits = self.logits[row, self.width - len(prompt) : -1].float()
        targets = self.ids[row, self.width - len(prompt) + 1 :, None]
        values = torch.log_softmax(logits, -1).gather(1, targets)[:, 0]
        return np.concatenate([[np.nan], values.cpu().numpy()]).astype(np.float32)


def step(
    model: SamplingModel,
    ids: torch.Tensor,
    mask: torch.Tensor,
    positions: torch.Tensor,
    cache: DynamicCache,
    *,
    every_position: bool = False,
) -> torch.Tensor:
    """One forward pass over the new tokens `ids` (R, T). Logits (R, T or 1, V)."""
    extra: dict[str, object] = {}
    if "position_ids" in model.base.accepts:
        extra["position_ids"] = positions
    if "logits_to_keep" in model.base.accepts and not every_position:
        extra["logits_to_keep"] = 1
    out = model.module(input_ids=ids, attention_mask=mask, past_key_values=cache, use_cache=True, **extra)
    return out.logits if every_position else out.logits[:, -1:]


def _decode(prefill: _Prefill, rows: list[_Row], stop_text: Callable[[_Row], bool]) -> None:
    """Extend `rows` in place until each has stopped, is full, or is cancelled."""
    device = prefill.ids.device
    owner = torch.tensor([i for i, r in enumerate(prefill.requests) for _ in range(r.num_samples)], device=device)
    if all(request.num_samples == 1 for request in prefill.requests):
        logits, mask = prefill.logits[:, -1], prefill.mask
    else:
        prefill.cache.batch_select_indices(owner)
        logits, mask = prefill.logits[owner, -1], prefill.mask[owner]
    positions = mask.sum(1, keepdim=True)
    live = rows
    choose = _Chooser(live, device)
    for at in range(max(len(row.uniforms) for row in rows)):
        tokens, logprobs = choose(logits.float(), at)
        for row, token, logprob in zip(live, tokens.tolist(), logprobs.tolist(), strict=True):
            if not row.done:
                _append(row, token, logprob, stop_text)
        keep = [index for index, row in enumerate(live) if not row.done]
        if not keep:
            return
        if len(keep) <= 0.75 * len(live):  # dropping rows copies the cache, so not for each single one
            index = torch.tensor(keep, device=device)
            prefill.cache.batch_select_indices(index)
            tokens, mask, positions = tokens[index], mask[index], positions[index]
            live = [live[i] for i in keep]
            choose = _Chooser(live, device)
        mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
        logits = step(prefill.model, tokens[:, None], mask, positions, prefill.cache)[:, -1]
        positions = positions + 1


def _append(row: _Row, token: int, logprob: float, stop_text: Callable[[_Row], bool]) -> None:
    row.tokens.append(token)
    row.logprobs.append(logprob)
    if token in row.request.stop_tokens or (row.request.stop_strings and stop_text(row)):
        row.stopped = row.done = True
    elif len(row.tokens) == len(row.uniforms) or row.request.cancelled():
        row.done = True


class _Chooser:
    """Draws the next token of every row by inverting the cumulative distribution at a number drawn in advance, so that a
    seeded sample does not depend on what else is in the batch."""

    def __init__(self, rows: list[_Row], device: torch.device) -> None:
        requests = [row.request for row in rows]
        longest = max(len(row.uniforms) for row in rows)
        uniforms = np.zeros((len(rows), longest))
        for index, row in enumerate(rows):
            uniforms[index, : len(row.uniforms)] = row.uniforms
        self.uniforms = torch.from_numpy(uniforms).to(device)
        temperature = torch.tensor([request.temperature for request in requests], device=device)[:, None]
        self.greedy = temperature == 0 if bool((temperature == 0).any()) else None
        self.temperature = torch.where(temperature == 0, 1.0, temperature) if bool((temperature != 1).any()) else None
        cut = any(request.top_p < 1 or request.top_k > 0 for request in requests)
        self.top_p = torch.tensor([request.top_p for request in requests], device=device)[:, None] if cut else None
        self.top_k = torch.tensor([request.top_k for request in requests], device=device)[:, None] if cut else None

    def __call__(self, logits: torch.Tensor, at: int) -> tuple[torch.Tensor, torch.Tensor]:
        if self.temperature is not None:
            logits = logits / self.temperature
        logprobs = torch.log_softmax(logits, -1)
        weights = logprobs.exp().double()
        if self.top_p is not None:
            weights = self._cut(weights)
        cumulative = weights.cumsum(-1)
        tokens = torch.searchsorted(cumulative, self.uniforms[:, at : at + 1] * cumulative[:, -1:], right=True)
        tokens = tokens.clamp(max=logits.shape[-1] - 1)
        if self.greedy is not None:
            tokens = torch.where(self.greedy, logits.argmax(-1, keepdim=True), tokens)
        return tokens[:, 0], logprobs.gather(1, tokens)[:, 0]

    def _cut(self, weights: torch.Tensor) -> torch.Tensor:
        """Zero what top-k and top-p leave out: a token stays when the mass of those more likely is below top_p."""
        assert self.top_p is not None
        assert self.top_k is not None
        ordered, index = weights.sort(-1, descending=True)
        before = ordered.cumsum(-1) - ordered
        rank = torch.arange(weights.shape[-1], device=weights.device)
        keep = (before < self.top_p) & ((self.top_k <= 0) | (rank < self.top_k))
        return torch.zeros_like(weights).scatter(-1, index, ordered * keep)
