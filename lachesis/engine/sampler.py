"""Continuous batching: sequences of any requests and any adapters are extended together, and join and leave between two tokens.

A request's prompt goes through the model once, whatever its number of samples, and so do equal prompts that wait together. Its
keys and values are then copied into one slot per sample. Numbers per sequence lie in tensors on the device; the host learns
which have ended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import numpy as np
import torch
from transformers.cache_utils import Cache

from lachesis.engine.kv_cache import SlotCache
from lachesis.engine.lora import Part, Snapshot
from lachesis.engine.model import BaseModel
from lachesis.engine.sample_request import Continuation, PromptAnswers, answer, top_k
from lachesis.engine.sampling_job import Job, Row
from lachesis.engine.slot_state import SlotState
from lachesis.engine.token_choice import Settings, choose

MOST_ROWS = 512
"""Sequences that are extended together."""
MOST_CACHE = 2**31
"""Bytes of keys and values, rows times the longest: room is reserved for the longest that a request allows."""
PREFILL_TOKENS = 4096
"""Prompt tokens, padding included, of one pass."""


class Sampler:
    """Owns the random stream of requests that bring no seed. Only the model thread may call this."""

    def __init__(self, base: BaseModel, seed: int | None = None) -> None:
        self.base = base
        self._random = np.random.default_rng(seed)
        self._waiting: deque[Job] = deque()
        self._rows: list[Row] = []
        self._lengths = np.zeros(0, np.int64)
        self._cache = SlotCache()
        self._state = SlotState(base.device)
        self._parts: list[Part] | None = None
        self._settings: Settings | None = None
        self._special: list[int] | None = None

    @property
    def busy(self) -> bool:
        return bool(self._rows or self._waiting)

    @property
    def waiting(self) -> int:
        """Requests of which not all samples have begun."""
        return len(self._waiting)

    def add(self, job: Job) -> None:
        """Queue a checked request."""
        self._waiting.append(job)

    def clear(self) -> list[Job]:
        """Drop everything, after an error; the jobs that have not ended."""
        jobs = list(dict.fromkeys([*(row.job for row in self._rows), *self._waiting]))
        self._waiting.clear()
        self._rows, self._lengths = [], np.zeros(0, np.int64)
        self._cache, self._state = SlotCache(), SlotState(self.base.device)
        self._changed()
        return jobs

    @torch.inference_mode()
    def step(self) -> None:
        """Let waiting requests in, then extend every sequence by one token."""
        self._drop_cancelled()
        entering = self._next()
        if entering:
            self._prefill(entering)
        if self._rows:
            self._decode()
        if not self.busy:
            self._cache.trim()
            self._state = SlotState(self.base.device)

    # --- who is in the batch ----------------------------------------------------------------------------------------------

    def _drop_cancelled(self) -> None:
        gone = [slot for slot, row in enumerate(self._rows) if row.job.request.cancelled()]
        if gone:
            self._leave(gone)
        if any(job.request.cancelled() for job in self._waiting):
            self._waiting = deque(job for job in self._waiting if not job.request.cancelled())

    def _next(self) -> list[Row]:
        """The sequences that there is room for, of the requests that came first, with at most PREFILL_TOKENS of prompts."""
        entering: list[Row] = []
        prompts: set[tuple[int, tuple[int, ...]]] = set()
        longest = max((row.length for row in self._rows), default=0)
        while self._waiting:
            job = self._waiting[0]
            first = self._new_row(job, job.entered)
            prompts.add(_prompt_key(job))
            width = max(len(prompt) for _, prompt in prompts)
            room = self._room(max(longest, first.length)) - len(self._rows) - len(entering)
            if room < 1 and (self._rows or entering):
                break
            if entering and width * len(prompts) > PREFILL_TOKENS:
                break
            longest = max(longest, first.length)
            count = min(job.request.num_samples - job.entered, max(1, room))
            entering += [first, *(self._new_row(job, job.entered + one) for one in range(1, count))]
            job.entered += count
            if job.entered == job.request.num_samples:
                self._waiting.popleft()
        return entering

    def _room(self, length: int) -> int:
        return min(MOST_ROWS, MOST_CACHE // (self.base.token_bytes * max(1, length)))

    def _new_row(self, job: Job, index: int) -> Row:
        request = job.request
        room = self.base.context - len(request.prompt)
        random = self._random if request.seed is None else _seeded(request.seed, index)
        return Row(job, index, min(room, request.max_tokens or room), random)

    def _leave(self, slots: Iterable[int]) -> None:
        """Free slots; the last sequences move into them."""
        for slot in sorted(slots, reverse=True):
            last = len(self._rows) - 1
            if slot != last:
                self._cache.move(last, slot, int(self._lengths[last]) + 1)
                self._state.move(last, slot)
                self._rows[slot], self._lengths[slot] = self._rows[last], self._lengths[last]
            self._rows.pop()
        self._lengths = self._lengths[: len(self._rows)]
        self._changed()

    def _changed(self) -> None:
        self._parts = self._settings = self._special = None

    # --- prompts ----------------------------------------------------------------------------------------------------------

    def _prefill(self, entering: list[Row]) -> None:
        """Pass the prompts of new sequences through the model, choose their first tokens, and give slots to those that go
        on."""
        unique: dict[tuple[int, tuple[int, ...]], int] = {}
        owners = [unique.setdefault(_prompt_key(row.job), len(unique)) for row in entering]
        jobs = [entering[owners.index(at)].job for at in range(len(unique))]
        lengths = [len(job.request.prompt) for job in jobs]
        ids = torch.zeros(len(jobs), max(lengths), dtype=torch.long)
        for at, job in enumerate(jobs):
            ids[at, : lengths[at]] = torch.tensor(job.request.prompt)
        self.base.sites.sample(_parts([job.snapshot for job in jobs], self.base.device))
        filled = self.base.new_cache()
        states = self.base.states(ids.to(self.base.device), cache=filled)
        for row, owner in zip(entering, owners, strict=True):
            if row.index == 0 and row.job.request.questions:
                row.job.answers = self._answer(row.job, states[owner, : lengths[owner]])
        owner = torch.tensor(owners, device=self.base.device)
        last = states[owner, torch.tensor([lengths[at] - 1 for at in owners], device=self.base.device)]
        start = len(self._rows)
        self._rows += entering
        self._lengths = np.concatenate([self._lengths, [lengths[at] for at in owners]])
        self._state.enter(start, entering)
        self._changed()
        self.base.sites.sample(_parts([row.job.snapshot for row in entering], self.base.device))  # the head may have one too
        ended = self._choose(self.base.logits(last), slice(start, start + len(entering)))
        self._keep(start, ended, filled, owner)
        self._leave(ended)

    def _keep(self, start: int, ended: list[int], filled: Cache, owner: torch.Tensor) -> None:
        """Copy what the prompts left in the cache to the new sequences' slots, unless all of them have ended."""
        if len(ended) < len(self._rows) - start:
            self._cache.reserve(len(self._rows), int(self._lengths.max()) + 1, filled)
            self._cache.enter(start, filled, owner)

    def _answer(self, job: Job, states: torch.Tensor) -> PromptAnswers:
        count = job.request.questions.alternatives
        random = self._random if job.request.seed is None else _seeded(job.request.seed, 2**32)
        self.base.sites.sample(_parts([job.snapshot], self.base.device))
        return answer(job.request, states, self.base.logits, random.random((states.shape[0] - 1, count)))

    # --- tokens -----------------------------------------------------------------------------------------------------------

    def _decode(self) -> None:
        count = len(self._rows)
        width = int(self._lengths.max()) + 1
        self._cache.lengthen(width)
        if self._parts is None:
            self._parts = _parts([row.job.snapshot for row in self._rows], self.base.device)
        self.base.sites.sample(self._parts)
        state = self._state
        states = self.base.decode(state.last[:count], state.position[:count], self._cache, state.slots[:count], width)
        self._lengths += 1
        ended = self._choose(self.base.logits(states), slice(0, count))
        if ended:
            self._leave(ended)

    def _choose(self, logits: torch.Tensor, rows: slice) -> list[int]:
        """Extend the sequences in these slots by a token; the slots of those that have ended, and are finished."""
        state = self._state
        if self._settings is None or rows.start:
            settings = state.settings(rows)
            self._settings = settings if rows == slice(0, len(self._rows)) else None
        else:
            settings = self._settings
        state.draw(self._rows)
        tokens, logprobs = choose(logits, state.uniforms_of(rows), settings)
        over, stopped = state.extend(rows, tokens, logprobs)
        stopped = stopped | self._look_at(rows, logits, tokens, stopped)
        ended = np.flatnonzero(over | stopped) + rows.start
        for slot in ended.tolist():
            row = self._rows[slot]
            values, own = state.generated(slot)
            row.job.finish(row.index, Continuation(values, own, bool(stopped[slot - rows.start]), _top(row)))
        return list(ended.tolist())

    def _look_at(self, rows: slice, logits: torch.Tensor, tokens: torch.Tensor, stopped: np.ndarray) -> np.ndarray:
        """What only some requests want of a step: which of them have reached a stop string; the likeliest tokens are noted."""
        found = np.zeros_like(stopped)
        if self._special is None:
            wanted = ((slot, row.job.request) for slot, row in enumerate(self._rows))
            self._special = [slot for slot, one in wanted if one.stop_strings or one.top_k_logprobs]
        for slot in self._special:
            at, row = slot - rows.start, self._rows[slot]
            if at < 0:
                continue
            request = row.job.request
            if request.stop_strings:
                row.text.append(int(tokens[at]))
                found[at] = self._ends(row)
            if request.top_k_logprobs:
                scaled = logits[at : at + 1] / (request.temperature or 1.0)
                row.likeliest += top_k(scaled, request.top_k_logprobs)
        return found

    def _ends(self, row: Row) -> bool:
        # A character takes at most 4 byte-level tokens, so this tail holds any stop string that has just been completed.
        tail = row.text[-(4 * max(map(len, row.job.request.stop_strings)) + 4) :]
        text = self.base.tokenizer.decode(tail)
        return any(stop in text for stop in row.job.request.stop_strings)


def _seeded(seed: int, stream: int) -> np.random.Generator:
    # Two's complement: a negative seed must not be that of its absolute value.
    return np.random.default_rng([seed % 2**64, stream])


def _prompt_key(job: Job) -> tuple[int, tuple[int, ...]]:
    return id(job.snapshot), tuple(job.request.prompt)


def _parts(snapshots: list[Snapshot | None], device: torch.device) -> list[Part]:
    """Which rows go with which adapter; those of the base model are left out, unless all are."""
    kinds = list(dict.fromkeys(snapshots))
    if len(kinds) == 1:
        return [(None, kinds[0])]
    rows: dict[Snapshot | None, list[int]] = {kind: [] for kind in kinds}
    for at, snapshot in enumerate(snapshots):
        rows[snapshot].append(at)
    return [(torch.tensor(found, device=device), kind) for kind, found in rows.items() if kind is not None]


def _top(row: Row) -> tuple[np.ndarray, np.ndarray] | None:
    if not row.likeliest:
        return None
    ids, values = zip(*row.likeliest, strict=True)
    return np.array(ids, np.int32), np.array(values, np.float32)
