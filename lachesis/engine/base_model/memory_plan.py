"""Divide the memory of a device between the sequences being sampled and the passes of training.

On a card the plan follows from a forecast (`memory_forecast`) and from what is free. On the
processor memory is seldom short, so fixed limits hold unless the weights are large.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from lachesis.base.errors import InsufficientMemoryError
from lachesis.engine.base_model.device import GIB
from lachesis.engine.base_model.memory_forecast import ModelSizes
from lachesis.engine.base_model.output_head import MAX_LOGITS_PER_PART

# Maximum number of tokens of one pass, padding included.
MAX_TOKENS_PER_PASS = 2**13
# A pass of fewer tokens leaves a card idle, so activations are computed again instead.
MIN_EFFICIENT_TOKENS = 2**11
# Maximum size of keys and values on the processor.
MAX_CACHE_BYTES_ON_CPU = 2**31
# Share of the memory that stays free, because blocks of different sizes leave gaps.
RESERVED_SHARE = 0.08
# Share for keys and values of what weights and adapters leave.
CACHE_SHARE = 0.5
# Maximum number of sequences that are extended together.
MAX_ROWS = 512
# The sequences for which there must be room at the least, for a group of answers.
MIN_SAMPLED_SEQUENCES = 1


@dataclass(frozen=True)
class MemoryPlan:
    """Hold the limits of the passes through one model."""

    cache_bytes: int = MAX_CACHE_BYTES_ON_CPU
    """Maximum size of keys and values."""
    max_pass_tokens: int = MAX_TOKENS_PER_PASS
    """Maximum number of tokens of a training pass with several sequences, padding included."""
    max_plain_tokens: int | None = None
    """A longer pass computes its activations again; None means that none does."""
    limits_logits: bool = True
    """Whether a pass of several sequences has no more logits than one part."""

    def recomputes(self, num_tokens: int) -> bool:
        """Return whether a pass of this many tokens computes its activations again."""
        return self.max_plain_tokens is not None and num_tokens > self.max_plain_tokens

    def shrink_passes(self, num_tokens: int) -> "MemoryPlan":
        """Return the plan after a pass of this many tokens has run out of memory."""
        return replace(self, max_pass_tokens=max(1, min(self.max_pass_tokens, num_tokens) // 2))

    def recompute_from(self, num_tokens: int) -> "MemoryPlan":
        """Return the plan after one sequence of this many tokens has run out of memory."""
        return replace(self, max_plain_tokens=num_tokens - 1)


@dataclass(frozen=True)
class ModelUse:
    """Describe the use of a model as far as it decides about memory: precision, rank, lengths."""

    name: str
    precision: str
    rank: int = 32
    sequence_tokens: int = 4096

    def __str__(self) -> str:
        return (
            f"{self.name}, {self.precision}, rank {self.rank}, "
            f"{self.sequence_tokens:,} tokens a sequence"
        )


def compute_needed_bytes(sizes: ModelSizes, use: ModelUse) -> float:
    """Return the least memory for this use: one sequence in training beside one being sampled."""
    cached_tokens = MIN_SAMPLED_SEQUENCES * use.sequence_tokens
    needed = sizes.compute_bytes(
        use.sequence_tokens, cached_tokens
    ) + _compute_sampling_logits_bytes(sizes)
    return needed / (1 - RESERVED_SHARE)


def _compute_sampling_logits_bytes(sizes: ModelSizes) -> int:
    """Return the room for the logits of the sequences being sampled, and for two copies."""
    return 3 * 4 * min(MAX_LOGITS_PER_PART, MAX_ROWS * sizes.vocab_size)


def make_memory_plan(sizes: ModelSizes, use: ModelUse, available_bytes: float) -> MemoryPlan:
    """Divide the memory of a device, whose model is not loaded yet.

    Args:
        sizes: What the model needs.
        use: The adapter's rank and the longest sequence.
        available_bytes: The free memory of the device.

    Raises:
        InsufficientMemoryError: Not even one sequence fits; the message says what would.
    """
    needed_bytes = compute_needed_bytes(sizes, use)
    if needed_bytes > available_bytes:
        raise InsufficientMemoryError(
            f"{use}: at least {needed_bytes / GIB:.1f} GiB are needed, and "
            f"{available_bytes / GIB:.1f} GiB are free; "
            f"{describe_alternatives(sizes, use, available_bytes)}"
        )
    remaining = (
        available_bytes * (1 - RESERVED_SHARE)
        - sizes.fixed_bytes
        - _compute_sampling_logits_bytes(sizes)
    )
    least_cache = MIN_SAMPLED_SEQUENCES * use.sequence_tokens * sizes.cache_bytes_per_token
    least_pass = sizes.recomputed_pass.compute_bytes(use.sequence_tokens)
    cache_bytes = min(max(CACHE_SHARE * remaining, least_cache), remaining - least_pass)
    pass_bytes = remaining - cache_bytes
    plain_tokens = max(0, sizes.plain_pass.compute_max_tokens(pass_bytes))
    if plain_tokens >= MIN_EFFICIENT_TOKENS:
        max_tokens = plain_tokens
    else:
        max_tokens, plain_tokens = sizes.recomputed_pass.compute_max_tokens(pass_bytes), 0
    return MemoryPlan(
        cache_bytes=int(cache_bytes),
        max_pass_tokens=min(MAX_TOKENS_PER_PASS, max_tokens),
        max_plain_tokens=plain_tokens,
        limits_logits=False,
    )


def describe_single_sequence(num_tokens: int, rank: int) -> str:
    """Explain that a single sequence does not fit, and which values to change."""
    return (
        f"one sequence of {num_tokens:,} tokens does not fit into the memory of the device; set a "
        f"smaller max_token_trainer_length, a lora_rank below {rank}, or base_weights=8bit"
    )


def describe_alternatives(sizes: ModelSizes, use: ModelUse, available_bytes: float) -> str:
    """Say which changes of the use would fit into the memory."""
    for changed_use in _iterate_smaller_uses(use):
        if compute_needed_bytes(sizes, changed_use) <= available_bytes:
            return (
                f"rank {changed_use.rank} and {changed_use.sequence_tokens:,} tokens a sequence "
                "would fit (lora_rank, max_token_trainer_length)"
            )
    return (
        f"its weights take {sizes.weights_bytes / GIB:.1f} GiB; choose a smaller model, store the "
        "weights in fewer bits (base_weights=8bit, on a card also 4bit), or train on another server"
    )


def _iterate_smaller_uses(use: ModelUse) -> Iterator[ModelUse]:
    """Yield uses with shorter sequences, and then with a smaller rank as well."""
    for rank in (use.rank, 8):
        sequence_tokens = use.sequence_tokens // 2
        while sequence_tokens >= 256:
            yield replace(use, rank=min(rank, use.rank), sequence_tokens=sequence_tokens)
            sequence_tokens //= 2
