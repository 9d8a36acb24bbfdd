"""Describe the adapter that is requested, and the limits of a model as its files give them."""

import functools
from dataclasses import asdict, dataclass
from typing import Any

from lachesis.base.errors import ModelNotFoundError

# Alpha is the same at every rank, as in the Tinker service.
ALPHA = 32
MAX_RANK = 512


@dataclass(frozen=True)
class LoraSpec:
    """Describe a requested adapter; `seed` determines the initial A."""

    rank: int = 32
    seed: int | None = None
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as a dictionary."""
        return asdict(self)

    @property
    def scale(self) -> float:
        """Return the factor of the adapter's output."""
        return ALPHA / self.rank


@dataclass(frozen=True)
class BridgedModel:
    """Describe the base model behind the bridge."""

    name: str
    context_length: int
    vocab_size: int
    eos_ids: frozenset[int]
    architecture: str

    @functools.cached_property
    def tokenizer(self) -> Any:
        """Return the tokenizer, which is needed for stop strings only."""
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.name)


def read_bridged_model(name: str) -> BridgedModel:
    """Read the configuration of a model in a folder or on the Hub.

    Raises:
        ModelNotFoundError: It cannot be read.
    """
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    try:
        config = AutoConfig.from_pretrained(name)
        eos_id = AutoTokenizer.from_pretrained(name).eos_token_id
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ModelNotFoundError(f"the model {name} cannot be read: {reason}") from error
    try:
        more_ids: Any = GenerationConfig.from_pretrained(name).eos_token_id
    except (OSError, ValueError):  # Not every model has one.
        more_ids = None
    ids = {eos_id, *(more_ids if isinstance(more_ids, list) else [more_ids])}
    text_config = config.get_text_config()
    max_positions = int(getattr(text_config, "max_position_embeddings", None) or 0)
    return BridgedModel(
        name=name,
        context_length=max_positions if max_positions > 0 else 4096,
        vocab_size=int(text_config.vocab_size),
        eos_ids=frozenset(int(token) for token in ids if token is not None),
        architecture=str(config.model_type),
    )
