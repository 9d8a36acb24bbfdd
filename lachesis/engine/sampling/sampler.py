"""Sample with continuous batching: sequences of all requests and adapters are extended together.

They join and leave the batch between two tokens. The prompt of a request passes through the model
once, whatever its number of samples, and so do equal prompts that wait together. Its keys and
values are then copied into one slot per sample. The numbers of each sequence are in tensors on the
device; the host learns only which sequences have ended.
"""

from collections import deque
from collections.abc import Iterable

import numpy as np
import torch
from transformers.cache_utils import Cache

from lachesis.engine.base_model.forward_pass import BaseLanguageModel
from lachesis.engine.base_model.lora_layers import AdapterAssignment, LoraAdapter
from lachesis.engine.base_model.memory_plan import MAX_ROWS
from lachesis.engine.sampling.admission import BatchRow, SamplingJob
from lachesis.engine.sampling.kv_cache import SlotCache
from lachesis.engine.sampling.prompt_logprobs import compute_prompt_logprobs, find_top_logprobs
from lachesis.engine.sampling.row_state import SlotState
from lachesis.engine.sampling.token_choice import TokenChoiceSettings, choose_tokens
from lachesis.tinker_server.sample_messages import PromptLogprobs, SampledSequence

# Maximum number of prompt tokens of one pass, padding included.
MAX_PREFILL_TOKENS = 4096


class Sampler:
    """Sample from one base model. Only the model thread may call this."""

    def __init__(self, base: BaseLanguageModel, seed: int | None = None) -> None:
        self.base = base
        # For requests without a seed; each sample of a seeded request has a generator of its own.
        self._rng = np.random.default_rng(seed)
        self._waiting_jobs: deque[SamplingJob] = deque()
        self._rows: list[BatchRow] = []
        # Rows whose prompts pass through the model at present.
        self._entering_rows: list[BatchRow] = []
        self._max_rows = MAX_ROWS
        self._lengths = np.zeros(0, np.int64)
        # Each sequence takes the room of the longest that a request allows.
        self._max_cache_bytes = base.memory_plan.cache_bytes
        self._cache = SlotCache(self._max_cache_bytes)
        self._state = SlotState(base.device)
        self._assignments: list[AdapterAssignment] | None = None
        self._settings: TokenChoiceSettings | None = None
        self._inspected_slots: list[int] | None = None

    @property
    def is_busy(self) -> bool:
        """Return whether any request waits or is being sampled."""
        return bool(self._rows or self._waiting_jobs)

    @property
    def num_waiting(self) -> int:
        """Return the number of requests of which not all samples have begun."""
        return len(self._waiting_jobs)

    def add(self, job: SamplingJob) -> None:
        """Queue a checked request."""
        self._waiting_jobs.append(job)

    def clear(self) -> list[SamplingJob]:
        """Drop all requests after an error, and return the jobs that have not ended."""
        # A job with several samples has several rows.
        rows = [*self._rows, *self._entering_rows]
        jobs = list(dict.fromkeys([*(row.job for row in rows), *self._waiting_jobs]))
        self._waiting_jobs.clear()
        self._reset_slots()
        return jobs

    def _reset_slots(self) -> None:
        self._rows, self._entering_rows, self._lengths = [], [], np.zeros(0, np.int64)
        self._cache = SlotCache(self._max_cache_bytes)
        self._state = SlotState(self.base.device)
        self._invalidate_step_inputs()

    def restart_with_less_memory(self) -> bool:
        """Begin all unfinished sequences again, with at most half as many at a time.

        A sequence with a seed gets the same tokens again.

        Returns:
            False if a single sequence was in progress, so that fewer are not possible.
        """
        # A row may be in both lists, and it may have ended already.
        rows = [
            row
            for row in dict.fromkeys([*self._rows, *self._entering_rows])
            if row.index not in row.job.sequences
        ]
        if len(rows) < 2:
            return False
        self._max_rows = len(rows) // 2
        for row in rows:
            row.job.unstarted_indices.append(row.index)
        self._waiting_jobs = deque(dict.fromkeys([*(row.job for row in rows), *self._waiting_jobs]))
        self._reset_slots()
        return True

    @torch.inference_mode()
    def step(self) -> None:
        """Admit waiting requests, then extend every sequence by one token."""
        self._drop_cancelled()
        self._entering_rows = self._admit_rows()
        if self._entering_rows:
            self._prefill(self._entering_rows)
            self._entering_rows = []
        if self._rows:
            self._decode()
        # An idle engine leaves the memory to training.
        if not self.is_busy:
            self._cache.trim()
            self._state = SlotState(self.base.device)

    # --- admission to the batch

    def _drop_cancelled(self) -> None:
        """Remove the sequences of requests that were cancelled."""
        cancelled_slots = [
            slot for slot, row in enumerate(self._rows) if row.job.request.is_cancelled()
        ]
        if cancelled_slots:
            self._free_slots(cancelled_slots)
        if any(job.request.is_cancelled() for job in self._waiting_jobs):
            self._waiting_jobs = deque(
                job for job in self._waiting_jobs if not job.request.is_cancelled()
            )

    def _admit_rows(self) -> list[BatchRow]:
        """Return the new sequences that there is room for, in the order of their requests.

        Their prompts have at most MAX_PREFILL_TOKENS tokens together.
        """
        new_rows: list[BatchRow] = []
        prompt_keys: set[tuple[int, tuple[int, ...]]] = set()
        max_length = max((row.max_length for row in self._rows), default=0)
        while self._waiting_jobs:
            job = self._waiting_jobs[0]
            first_row = self._create_row(job, job.unstarted_indices[0])
            prompt_keys.add(_make_prompt_key(job))
            max_prompt_tokens = max(len(prompt) for _, prompt in prompt_keys)
            num_free_rows = (
                self._compute_max_rows(max(max_length, first_row.max_length))
                - len(self._rows)
                - len(new_rows)
            )
            # A request that exceeds the limit of memory by itself is admitted alone, or it would
            # wait for ever.
            if num_free_rows < 1 and (self._rows or new_rows):
                break
            # Prompts are padded to the longest of their pass, and equal prompts are passed once.
            if new_rows and max_prompt_tokens * len(prompt_keys) > MAX_PREFILL_TOKENS:
                break
            max_length = max(max_length, first_row.max_length)
            num_admitted = min(len(job.unstarted_indices), max(1, num_free_rows))
            job.unstarted_indices.popleft()
            new_rows += [
                first_row,
                *(
                    self._create_row(job, job.unstarted_indices.popleft())
                    for _ in range(1, num_admitted)
                ),
            ]
            if not job.unstarted_indices:
                self._waiting_jobs.popleft()
        return new_rows

    def _compute_max_rows(self, length: int) -> int:
        row_bytes = self.base.kv_bytes_per_token * max(1, length)
        return min(self._max_rows, self._max_cache_bytes // row_bytes)

    def _create_row(self, job: SamplingJob, index: int) -> BatchRow:
        request = job.request
        max_new_tokens = self.base.context_length - len(request.prompt)
        if request.seed is None:
            rng = self._rng
        else:
            rng = _create_rng(request.seed, index)
        return BatchRow(job, index, min(max_new_tokens, request.max_tokens or max_new_tokens), rng)

    def _free_slots(self, slots: Iterable[int]) -> None:
        """Free slots; the last sequences move into them."""
        # From the last slot on, so that no slot is filled with a sequence that is freed next.
        for slot in sorted(slots, reverse=True):
            last_slot = len(self._rows) - 1
            if slot != last_slot:
                self._cache.move(last_slot, slot, int(self._lengths[last_slot]) + 1)
                self._state.move(last_slot, slot)
                self._rows[slot], self._lengths[slot] = (
                    self._rows[last_slot],
                    self._lengths[last_slot],
                )
            self._rows.pop()
        self._lengths = self._lengths[: len(self._rows)]
        self._invalidate_step_inputs()

    def _invalidate_step_inputs(self) -> None:
        self._assignments = self._settings = self._inspected_slots = None

    # --- prompts

    def _prefill(self, new_rows: list[BatchRow]) -> None:
        """Pass the prompts of new sequences through the model and choose their first tokens.

        Sequences that have not ended get slots.
        """
        # Sequences that share their prompt share its pass through the model too.
        prompt_index_by_key: dict[tuple[int, tuple[int, ...]], int] = {}
        prompt_indices = [
            prompt_index_by_key.setdefault(_make_prompt_key(row.job), len(prompt_index_by_key))
            for row in new_rows
        ]
        jobs = [
            new_rows[prompt_indices.index(index)].job for index in range(len(prompt_index_by_key))
        ]
        lengths = [len(job.request.prompt) for job in jobs]
        prompt_cache = self.base.create_prompt_cache()
        states = self._compute_prompt_states(jobs, lengths, prompt_cache)
        for row, prompt_index in zip(new_rows, prompt_indices, strict=True):
            if row.index == 0 and row.job.request.prompt_logprobs_spec:
                row.job.prompt_logprobs = self._compute_prompt_logprobs(
                    row.job, states[prompt_index, : lengths[prompt_index]]
                )
        row_lengths = [lengths[index] for index in prompt_indices]
        prompt_index = torch.tensor(prompt_indices, device=self.base.device)
        last_positions = torch.tensor(row_lengths, device=self.base.device) - 1
        start = len(self._rows)
        self._rows += new_rows
        self._lengths = np.concatenate([self._lengths, row_lengths])
        self._state.fill_slots(start, new_rows)
        self._invalidate_step_inputs()
        # The output head may have an adapter too.
        self.base.lora_layers.use_for_sampling(
            _assign_adapters([row.job.snapshot for row in new_rows], self.base.device)
        )
        ended_slots = self._choose_tokens(
            self.base.compute_logits(states[prompt_index, last_positions]),
            slice(start, start + len(new_rows)),
        )
        # Freeing moves the last sequences into the free slots, so the cache is filled before.
        self._store_prompt_cache(start, ended_slots, prompt_cache, prompt_index)
        self._free_slots(ended_slots)

    def _compute_prompt_states(
        self, jobs: list[SamplingJob], lengths: list[int], prompt_cache: Cache
    ) -> torch.Tensor:
        """Return the last layer's states of each prompt, shape (prompts, longest, hidden)."""
        ids = torch.zeros(len(jobs), max(lengths), dtype=torch.long)
        for index, job in enumerate(jobs):
            ids[index, : lengths[index]] = torch.tensor(job.request.prompt)
        self.base.lora_layers.use_for_sampling(
            _assign_adapters([job.snapshot for job in jobs], self.base.device)
        )
        return self.base.compute_states(ids.to(self.base.device), cache=prompt_cache)

    def _store_prompt_cache(
        self, start: int, ended_slots: list[int], prompt_cache: Cache, prompt_index: torch.Tensor
    ) -> None:
        """Copy the prompts' keys and values to the slots of sequences that have not ended."""
        if len(ended_slots) < len(self._rows) - start:
            self._cache.reserve(len(self._rows), int(self._lengths.max()) + 1, prompt_cache)
            self._cache.fill_slots(start, prompt_cache, prompt_index)

    def _compute_prompt_logprobs(self, job: SamplingJob, states: torch.Tensor) -> PromptLogprobs:
        """Return the log-probabilities of a prompt from its states (T, hidden)."""
        num_alternatives = job.request.prompt_logprobs_spec.num_alternatives
        if job.request.seed is None:
            rng = self._rng
        else:
            rng = _create_rng(job.request.seed, 2**32)
        self.base.lora_layers.use_for_sampling(_assign_adapters([job.snapshot], self.base.device))
        return compute_prompt_logprobs(
            job.request,
            states,
            self.base.compute_logits,
            rng.random((states.shape[0] - 1, num_alternatives)),
        )

    # --- tokens

    def _decode(self) -> None:
        """Compute the states of the next token of each row, and choose it."""
        num_rows = len(self._rows)
        max_length = int(self._lengths.max()) + 1
        self._cache.reserve_length(max_length)
        if self._assignments is None:
            self._assignments = _assign_adapters(
                [row.job.snapshot for row in self._rows], self.base.device
            )
        self.base.lora_layers.use_for_sampling(self._assignments)
        state = self._state
        states = self.base.decode(
            state.last_token[:num_rows],
            state.position[:num_rows],
            self._cache,
            state.slot_indices[:num_rows],
            max_length,
        )
        self._lengths += 1
        ended_slots = self._choose_tokens(self.base.compute_logits(states), slice(0, num_rows))
        if ended_slots:
            self._free_slots(ended_slots)

    def _choose_tokens(self, logits: torch.Tensor, rows: slice) -> list[int]:
        """Extend the sequences in these slots by a token, and return the slots that ended."""
        state = self._state
        settings = self._settings
        if settings is None or rows.start:
            settings = state.get_settings(rows)
            # Those of all rows hold until a row begins or ends.
            self._settings = settings if rows == slice(0, len(self._rows)) else None
        state.draw_uniforms(self._rows)
        tokens, logprobs = choose_tokens(logits, state.get_uniforms(rows), settings)
        at_limit, stopped = state.append_tokens(rows, tokens, logprobs)
        stopped = stopped | self._inspect_tokens(rows, logits, tokens, stopped)
        ended_slots = np.flatnonzero(at_limit | stopped) + rows.start
        for slot in ended_slots.tolist():
            row = self._rows[slot]
            row_tokens, row_logprobs = state.get_generated(slot)
            is_stopped = bool(stopped[slot - rows.start])
            sequence = SampledSequence(
                row_tokens, row_logprobs, is_stopped, row.stack_top_logprobs()
            )
            row.job.finish(row.index, sequence)
        return list(ended_slots.tolist())

    def _inspect_tokens(
        self, rows: slice, logits: torch.Tensor, tokens: torch.Tensor, stopped: np.ndarray
    ) -> np.ndarray:
        """Record requested likely tokens, and return the sequences that a stop string ends."""
        has_stop_string = np.zeros_like(stopped)
        if self._inspected_slots is None:
            slot_requests = ((slot, row.job.request) for slot, row in enumerate(self._rows))
            self._inspected_slots = [
                slot
                for slot, sample_request in slot_requests
                if sample_request.stop_strings or sample_request.num_top_logprobs
            ]
        for slot in self._inspected_slots:
            index, row = slot - rows.start, self._rows[slot]
            if index < 0:
                continue
            request = row.job.request
            if request.stop_strings:
                row.tokens.append(int(tokens[index]))
                has_stop_string[index] = self._ends_with_stop_string(row)
            if request.num_top_logprobs:
                scaled = logits[index : index + 1] / (request.temperature or 1.0)
                row.top_logprobs += find_top_logprobs(scaled, request.num_top_logprobs)
        return has_stop_string

    def _ends_with_stop_string(self, row: BatchRow) -> bool:
        # A character takes at most 4 byte-level tokens, so this tail contains any stop string that
        # has just been completed.
        tail = row.tokens[-(4 * max(map(len, row.job.request.stop_strings)) + 4) :]
        text = self.base.tokenizer.decode(tail)
        return any(stop in text for stop in row.job.request.stop_strings)


def _create_rng(seed: int, stream: int) -> np.random.Generator:
    # Two's complement keeps a negative seed different from its absolute value.
    return np.random.default_rng([seed % 2**64, stream])


def _make_prompt_key(job: SamplingJob) -> tuple[int, tuple[int, ...]]:
    return id(job.snapshot), tuple(job.request.prompt)


def _assign_adapters(
    snapshots: list[LoraAdapter | None], device: torch.device
) -> list[AdapterAssignment]:
    """Return which rows use which adapter; rows of the base model are left out unless all are."""
    adapters = list(dict.fromkeys(snapshots))
    if len(adapters) == 1:
        return [(None, adapters[0])]
    rows_by_adapter: dict[LoraAdapter | None, list[int]] = {adapter: [] for adapter in adapters}
    for index, snapshot in enumerate(snapshots):
        rows_by_adapter[snapshot].append(index)
    return [
        (torch.tensor(row_indices, device=device), adapter)
        for adapter, row_indices in rows_by_adapter.items()
        if adapter is not None
    ]
