"""The numbers of each sequence that is being sampled, in tensors on the device, by slot."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from lachesis.engine.sampling_job import Row
from lachesis.engine.token_choice import Settings

BLOCK = 64
"""The tensors of what was generated grow by so many tokens at least."""


class SlotState:
    """The numbers of each slot, on the device. `tokens`, `logprobs` and `uniforms` (slots, generated)."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._slots = self._generated = 0
        whole = {"dtype": torch.long, "device": device}
        self.slots = torch.zeros(0, **whole)
        self.last, self.position, self.count, self.limit, self.top_k = (torch.zeros(0, **whole) for _ in range(5))
        self.temperature, self.top_p = (torch.zeros(0, device=device) for _ in range(2))
        self.stops = torch.full((0, 1), -1, **whole)
        self.tokens, self.logprobs = torch.zeros(0, 0, **whole), torch.zeros(0, 0, device=device)
        self.uniforms = torch.zeros(0, 0, dtype=torch.float64, device=device)
        self._longest, self._new = 0, False

    def enter(self, start: int, rows: list[Row]) -> None:
        """Sequences that have generated nothing yet, in the slots from `start` on."""
        end, self._new = start + len(rows), True
        stops = max(len(row.job.request.stop_tokens) for row in rows)
        self._grow(end, self._generated, stops)
        at = slice(start, end)
        requests = [row.job.request for row in rows]
        self.position[at] = self._whole(len(request.prompt) - 1 for request in requests)
        self.count[at] = 0
        self.limit[at] = self._whole(row.limit for row in rows)
        self.top_k[at] = self._whole(request.top_k for request in requests)
        self.temperature[at] = torch.tensor([request.temperature for request in requests], device=self.device)
        self.top_p[at] = torch.tensor([request.top_p for request in requests], device=self.device)
        width = self.stops.shape[1]
        padded = [[*request.stop_tokens, *[-1] * (width - len(request.stop_tokens))] for request in requests]
        self.stops[at] = torch.tensor(padded, device=self.device)

    def _whole(self, values: Iterable[int]) -> torch.Tensor:
        return torch.tensor(list(values), dtype=torch.long, device=self.device)

    def draw(self, rows: list[Row]) -> None:
        """Have a number for the next token of every sequence. They are drawn in blocks, in the order of each one's own
        stream."""
        ahead = self._longest + 1
        if ahead > self._generated or self._new:
            self._new = False
            self._grow(len(rows), max(ahead, BLOCK), 0)
            for slot, row in enumerate(rows):
                count = min(row.limit, self._generated) - row.drawn
                if count > 0:
                    numbers = torch.from_numpy(row.random.random(count))
                    self.uniforms[slot, row.drawn : row.drawn + count] = numbers.to(self.device)
                    row.drawn += count

    def uniforms_of(self, rows: slice) -> torch.Tensor:
        return self.uniforms[self.slots[rows], self.count[rows]]

    def settings(self, rows: slice) -> Settings:
        return Settings.of(self.temperature[rows], self.top_p[rows], self.top_k[rows])

    def extend(self, rows: slice, tokens: torch.Tensor, logprobs: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
        """Note a token of each sequence; whether each is at its limit, and whether at a stop token."""
        self.tokens[self.slots[rows], self.count[rows]] = tokens
        self.logprobs[self.slots[rows], self.count[rows]] = logprobs
        self.last[rows] = tokens
        self.position[rows] += 1
        self.count[rows] += 1
        stopped = (tokens[:, None] == self.stops[rows]).any(1)
        both = torch.stack([self.count[rows] >= self.limit[rows], stopped, self.count[rows] > self._longest]).cpu().numpy()
        self._longest += int(both[2].any())
        return both[0], both[1]

    def generated(self, slot: int) -> tuple[list[int], list[float]]:
        count = int(self.count[slot])
        return self.tokens[slot, :count].tolist(), self.logprobs[slot, :count].tolist()

    def move(self, slot: int, to: int) -> None:
        for one in (self.last, self.position, self.count, self.limit, self.top_k, self.temperature, self.top_p, self.stops):
            one[to] = one[slot]
        for one in (self.tokens, self.logprobs, self.uniforms):
            one[to] = one[slot]

    def _grow(self, slots: int, generated: int, stops: int) -> None:
        if slots > self._slots:
            self._slots = max(slots, 2 * self._slots)
            self.slots = torch.arange(self._slots, device=self.device)
            for name in ("last", "position", "count", "limit", "top_k", "temperature", "top_p"):
                setattr(self, name, _larger(getattr(self, name), (self._slots,)))
            self.stops = _larger(self.stops, (self._slots, self.stops.shape[1]), -1)
        if stops > self.stops.shape[1]:
            self.stops = _larger(self.stops, (self._slots, stops), -1)
        if generated > self._generated:
            self._generated = max(generated, self._generated * 3 // 2)
        shape = (self._slots, self._generated)
        if self.tokens.shape != shape:
            self.tokens, self.logprobs, self.uniforms = (
                _larger(one, shape) for one in (self.tokens, self.logprobs, self.uniforms)
            )


def _larger(old: torch.Tensor, shape: tuple[int, ...], fill: int = 0) -> torch.Tensor:
    new = torch.full(shape, fill, dtype=old.dtype, device=old.device)
    new[tuple(slice(0, size) for size in old.shape)] = old
    return new
