"""Check the sequences of a training request, and group them into passes through the model."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from lachesis.base.arrays import Array
from lachesis.base.errors import EngineRequestError
from lachesis.engine import losses
from lachesis.engine.base_model.forward_pass import BaseLanguageModel
from lachesis.engine.base_model.output_head import MAX_LOGITS_PER_PART
from lachesis.tinker_server.protobuf_messages import DecodedDatum

# Maximum share of padding in a pass.
MAX_PADDING_SHARE = 0.1
# This much padding costs less than another pass.
CHEAP_PADDING_TOKENS = 256


def concatenate_inputs(data: list[DecodedDatum], name: str, dtype: type) -> Array:
    """Return one input of all datums, one after the other, (N,) or (N, K)."""
    return np.concatenate([datum.inputs[name] for datum in data]).astype(dtype, copy=False)


def group_into_passes(data: list[DecodedDatum], base: BaseLanguageModel) -> Iterator[list[int]]:
    """Yield indices of datums that pass together: similar length, equal inputs."""

    def get_sort_key(index: int) -> tuple[Any, ...]:
        inputs = data[index].inputs
        return tuple(sorted(inputs)), inputs["target_tokens"].shape[1:], len(data[index].tokens)

    datum_indices: list[int] = []
    num_tokens = 0
    for index in sorted(range(len(data)), key=get_sort_key):
        length = len(data[index].tokens)
        num_padded_tokens = length * (len(datum_indices) + 1)
        num_padding = num_padded_tokens - num_tokens - length
        # The plan may shrink between two passes.
        plan = base.memory_plan
        is_full = (
            (plan.limits_logits and num_padded_tokens * base.vocab_size > MAX_LOGITS_PER_PART)
            or num_padded_tokens > plan.max_pass_tokens
            or num_padding > max(CHEAP_PADDING_TOKENS, MAX_PADDING_SHARE * num_padded_tokens)
        )
        if datum_indices and (
            is_full or get_sort_key(index)[:2] != get_sort_key(datum_indices[0])[:2]
        ):
            yield datum_indices
            datum_indices, num_tokens = [], 0
        datum_indices.append(index)
        num_tokens += length
    yield datum_indices


def check_datum(index: int, datum: DecodedDatum, loss_fn: str, base: BaseLanguageModel) -> None:
    """Raise EngineRequestError for a datum that does not fit the loss or the model."""
    needed = ("target_tokens", *losses.LOSSES[loss_fn].inputs)
    missing = [key for key in needed if key not in datum.inputs]
    if missing:
        raise EngineRequestError(f"datum {index} lacks {', '.join(missing)}, which {loss_fn} needs")
    length = len(datum.tokens)
    if not 0 < length <= base.context_length:
        raise EngineRequestError(
            f"datum {index} has {length} tokens; allowed: 1 to {base.context_length}"
        )
    targets = datum.inputs["target_tokens"]
    if targets.ndim not in (1, 2) or len(targets) != length or targets.size == 0:
        raise EngineRequestError(
            f"datum {index}: model_input has {length} tokens, target_tokens has "
            f"{len(targets) if targets.ndim else 0} (its shape is {targets.shape}; allowed: "
            f"({length},) and ({length}, K))"
        )
    for name, ids in (("model_input", datum.tokens), ("target_tokens", targets)):
        if ids.min() < 0 or ids.max() >= base.vocab_size:
            raise EngineRequestError(
                f"datum {index}: {name} has a token id outside the vocabulary (0 to "
                f"{base.vocab_size - 1})"
            )
    unknown = sorted(set(datum.inputs) - {*needed, "weights"})
    if unknown:
        raise EngineRequestError(
            f"datum {index} has {', '.join(unknown)}, which {loss_fn} does not use; allowed: "
            f"{', '.join(needed)}, weights"
        )
    for key, value in datum.inputs.items():
        if key != "target_tokens" and value.shape != targets.shape:
            raise EngineRequestError(
                f"datum {index}: {key} has shape {value.shape}, target_tokens {targets.shape}"
            )
        if key != "target_tokens" and not np.isfinite(value.astype(np.float64)).all():
            raise EngineRequestError(f"datum {index}: {key} has a value that is not finite")
