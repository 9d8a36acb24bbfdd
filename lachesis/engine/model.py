"""The base model: a causal language model of Hugging Face, frozen, in memory once, with a site for adapters at each linear
layer."""

from __future__ import annotations

import inspect
import logging
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers.cache_utils import Cache

from lachesis.engine.cache import SlotCache
from lachesis.engine.lora import Sites
from lachesis.errors import ModelNotFoundError, UnsupportedModelError

log = logging.getLogger(__name__)
SAME = 1e-3
"""Most that two ways to one logit may differ, relative to the largest; bfloat16 has three digits and gets ten times that."""


class BaseModel:
    """The frozen model, its tokenizer and its limits."""

    def __init__(self, source: str, *, dtype: torch.dtype = torch.float32) -> None:
        """`source` is a local folder or a Hub name. Raises ModelNotFoundError when it cannot be loaded, UnsupportedModelError
        when it cannot be sampled token by token."""
        if source.startswith(("/", ".", "~")) and not (Path(source).expanduser() / "config.json").is_file():
            raise ModelNotFoundError(
                f"{source} holds no model (no config.json there); allowed: a folder written by save_pretrained, or the "
                "name of a causal language model on the Hugging Face Hub; `lachesis model build` makes a tiny one"
            )
        try:
            config = AutoConfig.from_pretrained(source)
            self.tokenizer = AutoTokenizer.from_pretrained(source)
            self.module = AutoModelForCausalLM.from_pretrained(source, config=config, dtype=dtype)
        except (OSError, ValueError) as error:
            reason = str(error).splitlines()[0]
            raise ModelNotFoundError(f"the model {source} cannot be loaded: {reason}") from error
        self.source = source
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.module.to(self.device).eval().requires_grad_(False)
        text = config.get_text_config()
        self.context = int(getattr(text, "max_position_embeddings", None) or 4096)
        self.vocabulary = int(self.module.get_input_embeddings().num_embeddings)
        self.eos_ids = _eos_ids(self.module, self.tokenizer)
        self._windows = _windows(text)
        self._body, self._head = self.module.base_model, self.module.get_output_embeddings()
        self._accepts = set(inspect.signature(self._body.forward).parameters)
        self._two_steps = False
        self.token_bytes = 1
        """Keys and values of one token in all layers."""
        self.sites = Sites(self.module)
        self._verify()

    def states(
        self,
        ids: torch.Tensor,
        *,
        cache: Cache | None = None,
        positions: torch.Tensor | None = None,
        mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """One pass over `ids` (R, T): states (R, T, ·) for `logits`. Sequences begin on the left; what stands behind their end
        has no effect on what stands before it. `positions` and `mask` (R, 1, T, L), added to the scores of attention, go with
        a cache that is filled to different lengths."""
        extra: dict[str, Any] = {"use_cache": cache is not None, "past_key_values": cache}
        if positions is not None and mask is not None:
            extra["attention_mask"] = self._masks(mask, positions)
            if "position_ids" in self._accepts:
                extra["position_ids"] = positions
        if self._two_steps:
            return self._body(input_ids=ids, **extra).last_hidden_state
        return self.module(input_ids=ids, **extra).logits

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """(…, V) float32, of any selection of states."""
        return (self._head(states) if self._two_steps else states).float()

    def new_cache(self) -> DynamicCache:
        """For whole prompts; every layer keeps all tokens."""
        return DynamicCache()

    def decode(
        self, ids: torch.Tensor, positions: torch.Tensor, cache: SlotCache, rows: torch.Tensor, width: int
    ) -> torch.Tensor:
        """The states (R, ·) after one more token per sequence: `ids` and `positions` (R,), of the slots `rows`, of which the
        longest has `width` tokens then."""
        cache.window = (rows, positions, width)
        seen = torch.arange(width, device=ids.device) <= positions[:, None]
        mask = torch.zeros(len(ids), 1, 1, width, device=ids.device, dtype=self.module.dtype)
        mask.masked_fill_(~seen[:, None, None], torch.finfo(mask.dtype).min)
        return self.states(ids[:, None], cache=cache, positions=positions[:, None], mask=mask)[:, 0]

    def _masks(self, mask: torch.Tensor, positions: torch.Tensor) -> Any:
        """Layers that look back only so far get a mask of their own."""
        if not self._windows:
            return mask
        found = {}
        for kind, window in self._windows.items():
            found[kind] = mask
            if window is not None:
                old = torch.arange(mask.shape[-1], device=mask.device) <= positions - window
                found[kind] = mask.masked_fill(old[:, None, None], torch.finfo(mask.dtype).min)
        return found if len(found) > 1 or "" not in found else found[""]

    @torch.inference_mode()
    def _verify(self) -> None:
        """Compare the ways in which the logits are made here with the model's own."""
        count = min(8, self.context)
        ids = torch.arange(1, count + 1, device=self.device)[None] % self.vocabulary
        expected = self.module(input_ids=ids).logits.float()
        limit = SAME * float(expected.abs().max().clamp(min=1.0)) * (1 if self.module.dtype == torch.float32 else 10)
        try:
            self._two_steps = True
            apart = _difference(self.logits(self.states(ids)), expected)
        except Exception as error:
            log.info("this model's head is not used alone: %s", error)
            apart = float("inf")
        self._two_steps = apart <= limit
        try:
            apart = _difference(self._decoded(ids), expected[:, -1])
        except Exception as error:
            raise UnsupportedModelError(f"the model {self.source} cannot be sampled with a cache: {error}") from error
        if not apart <= limit:
            raise UnsupportedModelError(
                f"the model {self.source} ({self.module.config.model_type}) gives other logits token by token than in one "
                f"pass, by {apart:.2g}; this engine offers models whose layers attend to the keys and values of earlier tokens"
            )

    def _decoded(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits of the last token (1, V), made token by token behind the first half."""
        half = ids.shape[1] // 2
        filled, cache = self.new_cache(), SlotCache()
        states = self.states(ids[:, :half], cache=filled)[:, -1]
        cache.reserve(1, ids.shape[1], filled)
        self.token_bytes = sum(layer.keys[0, :, 0].nbytes + layer.values[0, :, 0].nbytes for layer in filled.layers)
        first = torch.zeros(1, dtype=torch.long, device=ids.device)
        cache.enter(0, filled, first)
        for at in range(half, ids.shape[1]):
            states = self.decode(ids[:, at], first + at, cache, first, at + 1)
        return self.logits(states)


def _difference(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).abs().max()) if one.shape == other.shape else float("inf")


def _windows(config: Any) -> dict[str, int | None]:
    """How far back each kind of layer looks: None is everything. Empty when all layers look at everything."""
    window = getattr(config, "sliding_window", None)
    kinds = set(getattr(config, "layer_types", None) or ())
    if window is None or kinds == {"full_attention"}:
        return {}
    return {kind: window if "sliding" in kind else None for kind in kinds} if kinds else {"": window}


def _eos_ids(module: Any, tokenizer: Any) -> frozenset[int]:
    ids = getattr(module.generation_config, "eos_token_id", None)
    found = set(ids if isinstance(ids, list) else [ids]) | {tokenizer.eos_token_id}
    return frozenset(int(one) for one in found if one is not None)
