"""Hold the base models of the embedded engine and the weights that are sampled."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from lachesis.engine.json_messages import ModelLimits
from lachesis.engine.lora import LoraAdapter
from lachesis.engine.model import BaseLanguageModel
from lachesis.engine.sampler import Sampler


@dataclass(frozen=True)
class ServedModel:
    """Hold a base model and the sampler that uses it."""

    base: BaseLanguageModel
    sampler: Sampler


@dataclass
class SamplerEntry:
    """Hold frozen weights for sampling; a `snapshot` of None means the base model."""

    sampler_id: str
    served_model: ServedModel
    snapshot: LoraAdapter | None
    model_path: str | None
    last_used: float = field(default_factory=time.monotonic)

    @property
    def model_name(self) -> str:
        """Return the name of the base model."""
        return self.served_model.base.source

    @property
    def limits(self) -> ModelLimits:
        """Return what requests are checked against."""
        return self.served_model.base
