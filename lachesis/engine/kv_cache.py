"""Keys and values of the sequences that are being sampled, in slots that sequences enter and leave between two tokens."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

KEEP_BYTES = 2**28
"""An empty cache that is larger than this is given back."""


class SlotLayer(CacheLayerMixin):
    """One attention layer: keys and values (slots, heads, length, size)."""

    is_sliding = False  # windows are kept by the mask

    def __init__(self, owner: SlotCache) -> None:
        super().__init__()
        self.owner = owner

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        raise AssertionError("a slot is filled by `enter` before it is extended")

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add one token per sequence; keys and values of all tokens so far."""
        rows, at, width = self.owner.window
        self.keys[rows, :, at] = key_states[:, :, 0]
        self.values[rows, :, at] = value_states[:, :, 0]
        return self.keys[: len(rows), :, :width], self.values[: len(rows), :, :width]

    def get_seq_length(self) -> int:
        return self.owner.window[2] - 1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.owner.window[2], 0

    def get_max_length(self) -> int:
        return -1


class SlotCache(Cache):
    """Sequences lie in the slots 0 to n - 1. Only the model thread may call this."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.window: tuple[torch.Tensor, torch.Tensor, int] = (torch.zeros(0), torch.zeros(0), 0)
        """Of the pass under way: the slots, where their new token goes, and the length that attention looks at."""
        self._slots = self._length = 0

    def reserve(self, slots: int, length: int, like: Cache) -> None:
        """Have room for so many sequences of so many tokens; `like` is a cache of the same model."""
        if slots <= self._slots and length <= self._length:
            return
        new_slots = self._slots if slots <= self._slots else max(slots, 2 * self._slots)
        new_length = self._length if length <= self._length else -(-max(length, self._length * 3 // 2) // 64) * 64
        while len(self.layers) < len(like.layers):
            self.layers.append(SlotLayer(self))
        for layer, model in zip(self.layers, like.layers, strict=True):
            layer.keys = _grown(layer.keys, model.keys, new_slots, new_length)
            layer.values = _grown(layer.values, model.values, new_slots, new_length)
        self._slots, self._length = new_slots, new_length

    def lengthen(self, length: int) -> None:
        """Have room for sequences of so many tokens."""
        self.reserve(self._slots, length, self)

    def enter(self, start: int, source: Cache, rows: torch.Tensor) -> None:
        """Copy the rows of a filled cache into the slots from `start` on."""
        for layer, filled in zip(self.layers, source.layers, strict=True):
            length = filled.keys.shape[2]
            layer.keys[start : start + len(rows), :, :length] = filled.keys[rows]
            layer.values[start : start + len(rows), :, :length] = filled.values[rows]

    def move(self, slot: int, to: int, length: int) -> None:
        """Copy a sequence of this length to another slot."""
        for layer in self.layers:
            layer.keys[to, :, :length] = layer.keys[slot, :, :length]
            layer.values[to, :, :length] = layer.values[slot, :, :length]

    def trim(self) -> None:
        """Nothing is being sampled: give back what a large batch has taken."""
        if sum(layer.keys.nbytes + layer.values.nbytes for layer in self.layers) > KEEP_BYTES:
            self.layers.clear()
            self._slots = self._length = 0


def _grown(old: torch.Tensor | None, model: torch.Tensor, slots: int, length: int) -> torch.Tensor:
    new = model.new_zeros(slots, model.shape[1], length, model.shape[3])
    if old is not None:
        new[: old.shape[0], :, : old.shape[2]] = old
    return new
