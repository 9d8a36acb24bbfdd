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

from lachesis.base.errors import ModelNotFoundError
from lachesis.engine.kv_cache import SlotCache
from lachesis.engine.lora import Sites
from lachesis.engine.start_check import allowed, check, difference

log = logging.getLogger(__name__)


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
        limit = int(getattr(text, "max_position_embeddings", None) or 0)
        self.context = limit if limit > 0 else 4096
        self.vocabulary = int(self.module.get_input_embeddings().num_embeddings)
        self.eos_ids = _eos_ids(self.module, self.tokenizer)
        self.read_windows()
        self._body, self._head = self.module.base_model, self.module.get_output_embeddings()
        self._accepts = set(inspect.signature(self._body.forward).parameters)
        self._two_steps = False
        self.token_bytes = 1
        """Keys and values of one token in all layers."""
        self.sites = Sites(self.module)
        check(self)
        size = sum(weight.nbytes for weight in self.module.parameters())
        log.info("%s is loaded: %.2f GiB of weights on %s", source, size / 2**30, self.device)

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
        self.sites.rows = len(ids)
        if self._two_steps:
            return self._body(input_ids=ids, **extra).last_hidden_state
        return self.module(input_ids=ids, **extra).logits

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """(…, V) float32, of any selection of states."""
        self.sites.rows = 0
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
        if not self._looks_back:
            return mask
        masks = {}
        for kind, limit in self._looks_back.items():
            masks[kind] = mask
            if limit is not None:
                form, size = limit
                start = positions // size * size if form == "chunk" else positions - size + 1
                old = torch.arange(mask.shape[-1], device=mask.device) < start
                masks[kind] = mask.masked_fill(old[:, None, None], torch.finfo(mask.dtype).min)
        return masks.get("", masks)

    def read_windows(self) -> None:
        """Read from the configuration how far back each kind of layer looks."""
        self._looks_back = _looks_back(self.module.config.get_text_config())

    def choose_head(self, ids: torch.Tensor) -> None:
        """Use the head alone where that gives the logits of the whole model for `ids` (T,).

        Logits are then made only where they are needed.
        """
        expected = self.module(input_ids=ids[None]).logits.float()
        try:
            self._two_steps = True
            apart = difference(self.logits(self.states(ids[None])), expected)
        except Exception as error:
            log.info("this model's head is not used alone: %s", error)
            apart = float("inf")
        self._two_steps = apart <= allowed(self, expected)


def _looks_back(config: Any) -> dict[str, tuple[str, int] | None]:
    """Return how far back each kind of layer looks; empty if all layers look at everything.

    `("window", n)` is the last n tokens, `("chunk", n)` those of the token's own chunk of n, and
    None is everything.
    """
    window = getattr(config, "sliding_window", None)
    chunk = getattr(config, "attention_chunk_size", None)
    kinds = set(getattr(config, "layer_types", None) or ())
    if not kinds:
        return {"": ("window", window)} if window is not None else {}
    limits: dict[str, tuple[str, int] | None] = dict.fromkeys(kinds)
    for kind in kinds:
        if "sliding" in kind and window is not None:
            limits[kind] = ("window", window)
        elif "chunked" in kind and chunk is not None:
            limits[kind] = ("chunk", chunk)
    return limits if any(limits.values()) else {}


def _eos_ids(module: Any, tokenizer: Any) -> frozenset[int]:
    ids = getattr(module.generation_config, "eos_token_id", None)
    found = set(ids if isinstance(ids, list) else [ids]) | {tokenizer.eos_token_id}
    return frozenset(int(one) for one in found if one is not None)
