"""Cache keys and values of sequences, which come and go between tokens, in slots."""

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

# A larger cache is freed when nothing is sampled.
MAX_IDLE_BYTES = 2**28


class SlotLayer(CacheLayerMixin):
    """Hold the keys and values (slots, heads, length, size) of one attention layer."""

    is_sliding = False  # The mask implements attention windows.

    def __init__(self, owner: "SlotCache") -> None:
        super().__init__()
        self.owner = owner

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        raise AssertionError("a slot must be filled by `fill_slots` before it is extended")

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add one token per sequence, and return the keys and values of all tokens so far."""
        slots, positions, max_length = self.owner.decode_step
        self.keys[slots, :, positions] = key_states[:, :, 0]
        self.values[slots, :, positions] = value_states[:, :, 0]
        return self.keys[: len(slots), :, :max_length], self.values[: len(slots), :, :max_length]

    def get_seq_length(self) -> int:
        return self.owner.decode_step[2] - 1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.owner.decode_step[2], 0

    def get_max_length(self) -> int:
        return -1


class SlotCache(Cache):
    """Hold sequences in the slots 0 to n - 1. Only the model thread may call this."""

    def __init__(self, max_bytes: float = float("inf")) -> None:
        """Create an empty cache, which leaves no room for growth beyond `max_bytes`."""
        super().__init__(layers=[])
        self._max_bytes = max_bytes
        # The slots of the current pass, the positions of their new tokens, and the length that
        # attention covers.
        self.decode_step: tuple[torch.Tensor, torch.Tensor, int] = (
            torch.zeros(0),
            torch.zeros(0),
            0,
        )
        self._num_slots = self._reserved_length = 0

    def reserve(self, num_slots: int, max_length: int, template: Cache) -> None:
        """Allocate memory for these sequences; `template` is a cache of the same model."""
        if num_slots <= self._num_slots and max_length <= self._reserved_length:
            return
        # Growing copies everything, so there is always room for more than was requested.
        if num_slots <= self._num_slots:
            new_num_slots = self._num_slots
        else:
            new_num_slots = max(num_slots, 2 * self._num_slots)
        if max_length <= self._reserved_length:
            new_length = self._reserved_length
        else:
            new_length = _round_up(max(max_length, self._reserved_length * 3 // 2))
        bytes_per_token = sum(
            layer.keys[0, :, 0].nbytes + layer.values[0, :, 0].nbytes for layer in template.layers
        )
        if new_num_slots * new_length * bytes_per_token > self._max_bytes:
            new_num_slots = max(num_slots, self._num_slots)
            new_length = max(_round_up(max_length), self._reserved_length)
        while len(self.layers) < len(template.layers):
            self.layers.append(SlotLayer(self))
        for layer, template_layer in zip(self.layers, template.layers, strict=True):
            layer.keys = _grow(layer.keys, template_layer.keys, new_num_slots, new_length)
            layer.values = _grow(layer.values, template_layer.values, new_num_slots, new_length)
        self._num_slots, self._reserved_length = new_num_slots, new_length

    def reserve_length(self, length: int) -> None:
        """Allocate memory for sequences of this length."""
        self.reserve(self._num_slots, length, self)

    def fill_slots(self, start: int, source: Cache, rows: torch.Tensor) -> None:
        """Copy the rows of a filled cache into the slots from `start` on."""
        for layer, source_layer in zip(self.layers, source.layers, strict=True):
            length = source_layer.keys.shape[2]
            layer.keys[start : start + len(rows), :, :length] = source_layer.keys[rows]
            layer.values[start : start + len(rows), :, :length] = source_layer.values[rows]

    def move(self, source_slot: int, target_slot: int, length: int) -> None:
        """Copy a sequence of this length to another slot."""
        for layer in self.layers:
            layer.keys[target_slot, :, :length] = layer.keys[source_slot, :, :length]
            layer.values[target_slot, :, :length] = layer.values[source_slot, :, :length]

    def trim(self) -> None:
        """Free the memory of a large batch once nothing is sampled."""
        if sum(layer.keys.nbytes + layer.values.nbytes for layer in self.layers) > MAX_IDLE_BYTES:
            self.layers.clear()
            self._num_slots = self._reserved_length = 0


def _round_up(length: int) -> int:
    """Return the next multiple of 64."""
    return -(-length // 64) * 64


def _grow(
    old: torch.Tensor | None, template: torch.Tensor, num_slots: int, length: int
) -> torch.Tensor:
    new = template.new_zeros(num_slots, template.shape[1], length, template.shape[3])
    if old is not None:
        new[: old.shape[0], :, : old.shape[2]] = old
    return new
