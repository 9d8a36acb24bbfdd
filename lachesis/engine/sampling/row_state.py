"""Keep the numbers of each sampled sequence in tensors on the device, by slot."""

from collections.abc import Iterable

import numpy as np
import torch

from lachesis.engine.sampling.admission import BatchRow
from lachesis.engine.sampling.token_choice import TokenChoiceSettings

# The tensors of generated tokens grow by at least this many tokens.
MIN_GROWTH = 64


class SlotState:
    """Hold the numbers of each slot; `tokens`, `logprobs` and `uniforms` are (slots, generated)."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._slot_capacity = self._token_capacity = 0
        int64_options = {"dtype": torch.long, "device": device}
        self.slot_indices = torch.zeros(0, **int64_options)
        self.last_token, self.position, self.num_generated, self.max_new_tokens, self.top_k = (
            torch.zeros(0, **int64_options) for _ in range(5)
        )
        self.temperature, self.top_p = (torch.zeros(0, device=device) for _ in range(2))
        self.stop_tokens = torch.full((0, 1), -1, **int64_options)
        self.tokens, self.logprobs = (
            torch.zeros(0, 0, **int64_options),
            torch.zeros(0, 0, device=device),
        )
        self.uniforms = torch.zeros(0, 0, dtype=torch.float64, device=device)
        self._max_num_generated, self._has_new_rows = 0, False

    def fill_slots(self, start: int, rows: list[BatchRow]) -> None:
        """Put new sequences into the slots from `start` on."""
        end, self._has_new_rows = start + len(rows), True
        max_stop_tokens = max(len(row.job.request.stop_tokens) for row in rows)
        self._grow(end, self._token_capacity, max_stop_tokens)
        new_slots = slice(start, end)
        requests = [row.job.request for row in rows]
        self.position[new_slots] = self._to_int64_tensor(
            len(request.prompt) - 1 for request in requests
        )
        self.num_generated[new_slots] = 0
        self.max_new_tokens[new_slots] = self._to_int64_tensor(row.max_new_tokens for row in rows)
        self.top_k[new_slots] = self._to_int64_tensor(request.top_k for request in requests)
        self.temperature[new_slots] = torch.tensor(
            [request.temperature for request in requests], device=self.device
        )
        self.top_p[new_slots] = torch.tensor(
            [request.top_p for request in requests], device=self.device
        )
        width = self.stop_tokens.shape[1]
        padded = [
            [*request.stop_tokens, *[-1] * (width - len(request.stop_tokens))]
            for request in requests
        ]
        self.stop_tokens[new_slots] = torch.tensor(padded, device=self.device)

    def _to_int64_tensor(self, values: Iterable[int]) -> torch.Tensor:
        return torch.tensor(list(values), dtype=torch.long, device=self.device)

    def draw_uniforms(self, rows: list[BatchRow]) -> None:
        """Draw a random number for the next token of every sequence.

        They are drawn in blocks, in the order of each sequence's own random stream.
        """
        num_needed = self._max_num_generated + 1
        if num_needed > self._token_capacity or self._has_new_rows:
            self._has_new_rows = False
            self._grow(len(rows), max(num_needed, MIN_GROWTH), 0)
            for slot, row in enumerate(rows):
                # A sequence always draws the same numbers in the same order, whatever else is in
                # the batch, so a seed gives the same sample.
                num_missing = min(row.max_new_tokens, self._token_capacity) - row.num_drawn
                if num_missing > 0:
                    uniforms = torch.from_numpy(row.rng.random(num_missing))
                    self.uniforms[slot, row.num_drawn : row.num_drawn + num_missing] = uniforms.to(
                        self.device
                    )
                    row.num_drawn += num_missing

    def get_uniforms(self, rows: slice) -> torch.Tensor:
        """Return the random number of the next token of each row."""
        return self.uniforms[self.slot_indices[rows], self.num_generated[rows]]

    def get_settings(self, rows: slice) -> TokenChoiceSettings:
        """Return the sampling settings of these rows."""
        return TokenChoiceSettings.from_rows(
            self.temperature[rows], self.top_p[rows], self.top_k[rows]
        )

    def append_tokens(
        self, rows: slice, tokens: torch.Tensor, logprobs: torch.Tensor
    ) -> tuple[np.ndarray, np.ndarray]:
        """Add a token to each sequence; return those at their length limit or a stop token."""
        self.tokens[self.slot_indices[rows], self.num_generated[rows]] = tokens
        self.logprobs[self.slot_indices[rows], self.num_generated[rows]] = logprobs
        self.last_token[rows] = tokens
        self.position[rows] += 1
        self.num_generated[rows] += 1
        stopped = (tokens[:, None] == self.stop_tokens[rows]).any(1)
        flags = (
            torch.stack(
                [
                    self.num_generated[rows] >= self.max_new_tokens[rows],
                    stopped,
                    self.num_generated[rows] > self._max_num_generated,
                ]
            )
            .cpu()
            .numpy()
        )
        # One transfer from the device for all three flags; each one would wait for the device.
        self._max_num_generated += int(flags[2].any())
        return flags[0], flags[1]

    def get_generated(self, slot: int) -> tuple[list[int], list[float]]:
        """Return the tokens and log-probabilities that a slot has generated."""
        num_generated = int(self.num_generated[slot])
        return self.tokens[slot, :num_generated].tolist(), self.logprobs[
            slot, :num_generated
        ].tolist()

    def move(self, source_slot: int, target_slot: int) -> None:
        """Copy the numbers of one slot to another."""
        for tensor in (
            self.last_token,
            self.position,
            self.num_generated,
            self.max_new_tokens,
            self.top_k,
            self.temperature,
            self.top_p,
            self.stop_tokens,
        ):
            tensor[target_slot] = tensor[source_slot]
        for tensor in (self.tokens, self.logprobs, self.uniforms):
            tensor[target_slot] = tensor[source_slot]

    def _grow(self, num_slots: int, num_tokens: int, num_stop_tokens: int) -> None:
        """Enlarge all rows' tensors to hold that many rows, tokens and stop tokens."""
        if num_slots > self._slot_capacity:
            self._slot_capacity = max(num_slots, 2 * self._slot_capacity)
            self.slot_indices = torch.arange(self._slot_capacity, device=self.device)
            for name in (
                "last_token",
                "position",
                "num_generated",
                "max_new_tokens",
                "top_k",
                "temperature",
                "top_p",
            ):
                setattr(self, name, _enlarge(getattr(self, name), (self._slot_capacity,)))
            self.stop_tokens = _enlarge(
                self.stop_tokens, (self._slot_capacity, self.stop_tokens.shape[1]), -1
            )
        if num_stop_tokens > self.stop_tokens.shape[1]:
            self.stop_tokens = _enlarge(
                self.stop_tokens, (self._slot_capacity, num_stop_tokens), -1
            )
        if num_tokens > self._token_capacity:
            self._token_capacity = max(num_tokens, self._token_capacity * 3 // 2)
        shape = (self._slot_capacity, self._token_capacity)
        if self.tokens.shape != shape:
            self.tokens, self.logprobs, self.uniforms = (
                _enlarge(tensor, shape) for tensor in (self.tokens, self.logprobs, self.uniforms)
            )


def _enlarge(old: torch.Tensor, shape: tuple[int, ...], fill: int = 0) -> torch.Tensor:
    new = torch.full(shape, fill, dtype=old.dtype, device=old.device)
    new[tuple(slice(0, size) for size in old.shape)] = old
    return new
