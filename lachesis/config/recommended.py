"""Recommend a LoRA rank and a learning rate for reinforcement learning of a model.

The rule for the learning rate is that of the Tinker cookbook (`hyperparam_utils`): between models
of one family, the best learning rate falls with a power of the width, with the exponents 0.781 for
Llama and 0.0775 for Qwen, measured by Thinking Machines. What it is carried over from is the
cookbook's recipe `rl_basic`: 4e-5 on Llama-3.1-8B, whose width is 4096.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

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
