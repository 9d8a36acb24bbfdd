"""Decide how a model is loaded: its device, the precision of its weights, and the memory for it."""

import logging
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any, Literal

import torch
from transformers import PreTrainedConfig

from lachesis.base.errors import MissingDependencyError, UnsupportedModelError
from lachesis.engine.base_model.device import (
    GIB,
    choose_device,
    describe_device,
    measure_free_bytes,
)
from lachesis.engine.base_model.memory_forecast import ModelSizes, measure_model_sizes
from lachesis.engine.base_model.memory_plan import (
    MemoryPlan,
    ModelUse,
    compute_needed_bytes,
    make_memory_plan,
)

log = logging.getLogger(__name__)
Precision = Literal["auto", "float32", "bfloat16"]
BaseWeights = Literal["full", "8bit", "4bit"]


@dataclass(frozen=True)
class LoadSettings:
    """Hold the settings to load a model with; `precision` auto is bfloat16 where the card can."""

    precision: Precision = "auto"
    base_weights: BaseWeights = "full"
    rank: int = 32
    """Rank of the adapters that the memory is planned for."""
    sequence_tokens: int = 4096
    """Length of the longest sequence that the memory is planned for."""
    memory_limit_bytes: int | None = None
    """Memory of the device to use at most; None means all that is free."""
    device: torch.device = field(default_factory=choose_device)

    @property
    def dtype(self) -> torch.dtype:
        """Return the type of the weights that are not quantised, and of the activations."""
        if self.precision == "auto":
            has_bfloat16 = self.device.type == "cuda" and torch.cuda.is_bf16_supported(False)
            return torch.bfloat16 if has_bfloat16 else torch.float32
        return {"float32": torch.float32, "bfloat16": torch.bfloat16}[self.precision]

    @property
    def bits(self) -> int | None:
        """Return the bits of a quantised weight, or None."""
        return {"full": None, "8bit": 8, "4bit": 4}[self.base_weights]

    def make_quantization_kwargs(self) -> dict[str, Any]:
        """Return the arguments of `from_pretrained` that quantise linear layers, if any.

        Raises:
            MissingDependencyError: bitsandbytes is not installed.
            UnsupportedModelError: The device cannot train with weights of 4 bits.
        """
        if not self.bits:
            return {}
        if self.bits == 4 and self.device.type == "cpu":
            raise UnsupportedModelError(
                "base_weights=4bit needs a CUDA card, because bitsandbytes gives wrong gradients "
                "on a processor; allowed here: full, 8bit"
            )
        if find_spec("bitsandbytes") is None:
            raise MissingDependencyError(
                f"base_weights={self.base_weights} needs bitsandbytes, which is not installed; "
                "install it with `pip install 'lachesis-rl[quantized]'`, or set base_weights=full"
            )
        # It says in every pass that 8 bits are computed with in float16.
        logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
        from transformers import BitsAndBytesConfig

        config = BitsAndBytesConfig(
            load_in_8bit=self.bits == 8,
            load_in_4bit=self.bits == 4,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_compute_dtype=self.dtype,
        )
        return {"quantization_config": config, "device_map": {"": self.device}}

    def plan_memory(self, source: str, config: PreTrainedConfig) -> MemoryPlan:
        """Forecast the memory of a model and divide what the device has.

        Raises:
            InsufficientMemoryError: The model does not fit.
        """
        if self.device.type == "cpu" and self.memory_limit_bytes is None:
            return MemoryPlan()
        sizes, use = self.measure(source, config)
        free_bytes = measure_free_bytes(self.device)
        if self.memory_limit_bytes is not None:
            free_bytes = min(free_bytes, self.memory_limit_bytes)
        plan = make_memory_plan(sizes, use, free_bytes)
        log.info(
            "%s: at least %.1f of %.1f GiB on %s; passes of at most %d tokens, %.1f GiB of keys "
            "and values",
            use,
            compute_needed_bytes(sizes, use) / GIB,
            free_bytes / GIB,
            describe_device(self.device),
            plan.max_pass_tokens,
            plan.cache_bytes / GIB,
        )
        return plan

    def measure(self, source: str, config: PreTrainedConfig) -> tuple[ModelSizes, ModelUse]:
        """Return the memory needs of a model and its intended use, without loading it."""
        sizes = measure_model_sizes(config, rank=self.rank, dtype=self.dtype, bits=self.bits)
        name = source.rstrip("/").rsplit("/", 1)[-1]
        precision = str(self.dtype).removeprefix("torch.")
        if self.bits:
            precision = f"{self.bits}-bit weights"
        return sizes, ModelUse(name, precision, self.rank, self._limit_sequence_tokens(config))

    def _limit_sequence_tokens(self, config: PreTrainedConfig) -> int:
        """Return the planned length, or the model's context where that is shorter."""
        max_positions = getattr(config.get_text_config(), "max_position_embeddings", None)
        return min(self.sequence_tokens, int(max_positions or self.sequence_tokens))
