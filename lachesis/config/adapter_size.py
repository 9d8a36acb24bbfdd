"""Compute the size of a LoRA adapter and of its checkpoints from a model's configuration.

    parameters per rank = sum over adapted layers of (inputs + outputs)
    checkpoint          = weights, Adam's two moments, and the weights for the sampler, in float32

All linear layers of attention and MLP and the output layer are adapted, as Tinker does by default.
A mixture of experts shares factors between experts in a way that no configuration tells, so its
size is not computed.
"""

from __future__ import annotations

from lachesis.base.json_text import Json

# Weights and two moments for training, and the weights once more for sampling, of 4 bytes each.
BYTES_PER_PARAMETER = 16
BYTES_PER_GB = 1e9
_EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")


def count_adapter_parameters(settings: Json, rank: int) -> int | None:
    """Return the number of parameters of an adapter, or None if the sizes are not known.

    Args:
        settings: The model's configuration in the form of transformers.
        rank: The rank of the adapter.
    """
    if any(settings.get(key) for key in _EXPERT_KEYS):
        return None
    try:
        width, mlp_width = int(settings["hidden_size"]), int(settings["intermediate_size"])
        layers, heads = int(settings["num_hidden_layers"]), int(settings["num_attention_heads"])
        vocabulary = int(settings["vocab_size"])
    except (KeyError, TypeError, ValueError):
        return None
    # With grouped queries there are fewer heads for keys and values; older models name neither.
    key_heads = int(settings.get("num_key_value_heads") or heads)
    head_width = int(settings.get("head_dim") or width // heads)
    queries, keys = heads * head_width, key_heads * head_width
    attention = 2 * (width + queries) + 2 * (width + keys)
    mlp = 3 * (width + mlp_width)
    return rank * (layers * (attention + mlp) + width + vocabulary)


def estimate_checkpoint_gb(settings: Json, rank: int) -> float | None:
    """Return the gigabytes of one checkpoint, or None if the sizes of the layers are not known."""
    parameters = count_adapter_parameters(settings, rank)
    if parameters is None:
        return None
    return parameters * BYTES_PER_PARAMETER / BYTES_PER_GB
