"""Hold the base model: a frozen causal language model of Hugging Face.

It is in memory once; each of its linear layers can add adapters.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers.cache_utils import Cache

from lachesis.base.errors import ModelNotFoundError
from lachesis.engine.base_model.load import LoadSettings
from lachesis.engine.base_model.lora_layers import LoraLayers
from lachesis.engine.base_model.recomputation import set_recomputation
from lachesis.engine.sampling.kv_cache import SlotCache
from lachesis.weight_agreement.at_start import (
    compute_tolerance,
    measure_difference,
    verify_base_model,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)


class BaseLanguageModel:
    """Hold the frozen model, its tokenizer and its limits."""

    def __init__(self, source: str, settings: LoadSettings | None = None) -> None:
        """Load the model from a local folder or by its name on the Hub.

        Raises:
            ModelNotFoundError: It cannot be loaded.
            InsufficientMemoryError: It does not fit into the memory of the device.
            UnsupportedModelError: It cannot be sampled token by token.
        """
        if (
            source.startswith(("/", ".", "~"))
            and not (Path(source).expanduser() / "config.json").is_file()
        ):
            raise ModelNotFoundError(
                f"{source} is not a model (it has no config.json); allowed: a folder written by "
                "save_pretrained, or the name of a causal language model on the Hugging Face Hub; "
                "`lachesis model build` makes a tiny one"
            )
        try:
            config = AutoConfig.from_pretrained(source)
            self.tokenizer = AutoTokenizer.from_pretrained(source)
            settings = settings or LoadSettings()
            self.memory_plan = settings.plan_memory(source, config)
            self.module = AutoModelForCausalLM.from_pretrained(
                source, config=config, dtype=settings.dtype, **settings.make_quantization_kwargs()
            )
        except (OSError, ValueError) as error:
            reason = str(error).splitlines()[0]
            raise ModelNotFoundError(f"the model {source} cannot be loaded: {reason}") from error
        self.source = source
        self.device = settings.device
        if not settings.bits:
            self.module.to(self.device)
        self.module.eval().requires_grad_(False)
        text_config = config.get_text_config()
        max_positions = int(getattr(text_config, "max_position_embeddings", None) or 0)
        # Whether results differ by rounding in float32 alone. Layers of 8 bits round their inputs;
        # those of 4 bits are made float32 again first.
        self.is_exact = self.module.dtype == torch.float32 and settings.bits != 8
        self.can_recompute = bool(self.module.supports_gradient_checkpointing)
        self.context_length = max_positions if max_positions > 0 else 4096
        self.vocab_size = int(self.module.get_input_embeddings().num_embeddings)
        self.eos_ids = _read_eos_ids(self.module, self.tokenizer)
        self.read_attention_windows()
        self._backbone, self._lm_head = self.module.base_model, self.module.get_output_embeddings()
        self._forward_parameters = set(inspect.signature(self._backbone.forward).parameters)
        self._has_separate_head = False
        # Size of the keys and values of one token in all layers.
        self.kv_bytes_per_token = 1
        self.lora_layers = LoraLayers(self.module)
        verify_base_model(self)
        size = sum(weight.nbytes for weight in self.module.parameters())
        log.info("%s is loaded: %.2f GiB of weights on %s", source, size / 2**30, self.device)

    @contextlib.contextmanager
    def recompute_activations(self, is_on: bool) -> Iterator[None]:
        """Compute the activations inside layers again for the gradients of the passes within."""
        if not is_on:
            yield
            return
        try:
            set_recomputation(self.module, True)
            yield
        finally:
            set_recomputation(self.module, False)

    def compute_states(
        self,
        ids: torch.Tensor,
        *,
        cache: Cache | None = None,
        positions: torch.Tensor | None = None,
        mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run one pass over `ids` (R, T) and return the states (R, T, ·) for `compute_logits`.

        Sequences begin on the left; padding after their end has no effect on them. `positions` and
        `mask` (R, 1, T, L), which is added to the attention scores, are for a cache that is filled
        to different lengths.
        """
        model_kwargs: dict[str, Any] = {"use_cache": cache is not None, "past_key_values": cache}
        if positions is not None and mask is not None:
            model_kwargs["attention_mask"] = self._build_masks(mask, positions)
            if "position_ids" in self._forward_parameters:
                model_kwargs["position_ids"] = positions
        self.lora_layers.num_sequences = len(ids)
        if self._has_separate_head:
            return self._backbone(input_ids=ids, **model_kwargs).last_hidden_state
        return self.module(input_ids=ids, **model_kwargs).logits

    def compute_logits(self, states: torch.Tensor) -> torch.Tensor:
        """Return the logits (…, V) in float32 of any selection of states."""
        self.lora_layers.num_sequences = 0
        return (self._lm_head(states) if self._has_separate_head else states).float()

    def create_prompt_cache(self) -> DynamicCache:
        """Return a cache for whole prompts, in which every layer keeps all tokens."""
        return DynamicCache()

    def decode(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        cache: SlotCache,
        slots: torch.Tensor,
        max_length: int,
    ) -> torch.Tensor:
        """Return the states (R, ·) after one more token per sequence.

        Args:
            ids: The tokens, (R,).
            positions: Their positions, (R,).
            cache: The keys and values of the sequences.
            slots: The slots of the sequences.
            max_length: The length of the longest sequence with the new token.
        """
        cache.decode_step = (slots, positions, max_length)
        is_visible = torch.arange(max_length, device=ids.device) <= positions[:, None]
        mask = torch.zeros(len(ids), 1, 1, max_length, device=ids.device, dtype=self.module.dtype)
        mask.masked_fill_(~is_visible[:, None, None], torch.finfo(mask.dtype).min)
        return self.compute_states(
            ids[:, None], cache=cache, positions=positions[:, None], mask=mask
        )[:, 0]

    def _build_masks(self, mask: torch.Tensor, positions: torch.Tensor) -> Any:
        """Return one mask, or one for each kind of layer where some have a window."""
        if not self._attention_windows:
            return mask
        masks = {}
        for layer_type, window in self._attention_windows.items():
            masks[layer_type] = mask
            if window is not None:
                window_type, window_size = window
                if window_type == "chunk":
                    window_start = positions // window_size * window_size
                else:
                    window_start = positions - window_size + 1
                is_outside = torch.arange(mask.shape[-1], device=mask.device) < window_start
                masks[layer_type] = mask.masked_fill(
                    is_outside[:, None, None], torch.finfo(mask.dtype).min
                )
        return masks.get("", masks)

    def read_attention_windows(self) -> None:
        """Read from the configuration how far back each kind of layer looks."""
        self._attention_windows = _read_attention_windows(self.module.config.get_text_config())

    def detect_separate_head(self, ids: torch.Tensor) -> None:
        """Use the output head separately if that gives the same logits as the whole model for `ids`
        (T,).

        Logits are then computed only where they are needed.
        """
        expected = self.module(input_ids=ids[None]).logits.float()
        try:
            self._has_separate_head = True
            max_difference = measure_difference(
                self.compute_logits(self.compute_states(ids[None])), expected
            )
        except Exception as error:
            log.info("the output head of this model cannot be used separately: %s", error)
            max_difference = float("inf")
        self._has_separate_head = max_difference <= compute_tolerance(self, expected)


def _read_attention_windows(config: object) -> dict[str, tuple[str, int] | None]:
    """Return how far back each kind of layer looks; empty if all layers look at everything.

    `("window", n)` means the last n tokens, `("chunk", n)` those of the token's own chunk of n, and
    None everything.
    """
    window = getattr(config, "sliding_window", None)
    chunk = getattr(config, "attention_chunk_size", None)
    layer_types = set(getattr(config, "layer_types", None) or ())
    if not layer_types:
        if window is not None:
            return {"": ("window", window)}
        return {}
    windows: dict[str, tuple[str, int] | None] = dict.fromkeys(layer_types)
    for layer_type in layer_types:
        if "sliding" in layer_type and window is not None:
            windows[layer_type] = ("window", window)
        elif "chunked" in layer_type and chunk is not None:
            windows[layer_type] = ("chunk", chunk)
    if any(windows.values()):
        return windows
    return {}


def _read_eos_ids(module: Any, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    ids = getattr(module.generation_config, "eos_token_id", None)
    eos_ids = set(ids if isinstance(ids, list) else [ids]) | {tokenizer.eos_token_id}
    return frozenset(int(eos_id) for eos_id in eos_ids if eos_id is not None)
