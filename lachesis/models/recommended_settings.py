"""Recommend the rank and the learning rate of a model, and compute the size of its adapter."""

from pydantic import BaseModel, ConfigDict

from lachesis.base.json_text import Json

REFERENCE_RATE = 4e-5
REFERENCE_WIDTH, REFERENCE_EXPONENT = 4096, 0.781
# The width at which families do not differ.
COMMON_WIDTH = 2000
EXPONENTS = {"llama": 0.781, "qwen": 0.0775}
RANK = 32
RANK_SOURCE = (
    "the default of Tinker and of its cookbook; for reinforcement learning smaller ranks learn as "
    "well (LoRA Without Regret)"
)
RECIPE = "4e-5 of the Tinker cookbook's rl_basic on Llama-3.1-8B"


class Recommendation(BaseModel):
    """Recommend settings of the trainer, each with its source."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    lora_rank: int = RANK
    lora_rank_source: str = RANK_SOURCE
    learning_rate: float
    learning_rate_source: str


def recommend_settings(model: str, width: int | None) -> Recommendation:
    """Return the recommendation for a model.

    Args:
        model: The model's name, which shows its family.
        width: The size of its hidden states, if it is known.
    """
    family = next((name for name in EXPONENTS if name in model.lower()), None)
    if family is None:
        return Recommendation(
            learning_rate=REFERENCE_RATE,
            learning_rate_source=f"{RECIPE}; no rule is known for this family",
        )
    if width is None:
        return Recommendation(
            learning_rate=REFERENCE_RATE,
            learning_rate_source=f"{RECIPE}; the model's width is not known on this machine",
        )
    factor = _compute_factor(width, EXPONENTS[family]) / _compute_factor(
        REFERENCE_WIDTH, REFERENCE_EXPONENT
    )
    return Recommendation(
        learning_rate=float(f"{REFERENCE_RATE * factor:.2g}"),
        learning_rate_source=f"{RECIPE}, carried over to a width of {width} by the cookbook's rule "
        f"for {family.capitalize()}",
    )


def _compute_factor(width: int, exponent: float) -> float:
    return float((COMMON_WIDTH / width) ** exponent)


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
