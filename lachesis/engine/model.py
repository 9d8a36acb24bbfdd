"""Load a Hugging Face causal language model, and keep a copy for sampling with the adapter folded into its weights.

The copy shares every parameter with the original until an adapter is folded in, so it costs memory only for the linear
layers that the adapter touches. Folding makes a decoding step as cheap as that of the plain model.
"""

from __future__ import annotations

import copy
import inspect
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.pytorch_utils import Conv1D

from lachesis.errors import ModelNotFoundError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Snapshot:
    """A frozen adapter. `factors` maps a linear layer's path to A (rank, in) and B (out, rank); the layer's weight
    becomes W + scale * B A (Hu et al. 2021, arXiv:2106.09685, eq. 3)."""

    factors: dict[str, tuple[torch.Tensor, torch.Tensor]]
    scale: float


class BaseModel:
    """The frozen model, its tokenizer and its limits."""

    def __init__(self, source: str) -> None:
        """`source` is a local folder or a Hub name. Raises ModelNotFoundError when it cannot be loaded."""
        if source.startswith(("/", ".", "~")) and not (Path(source).expanduser() / "config.json").is_file():
            raise ModelNotFoundError(
                f"{source} holds no model (no config.json there); allowed: a folder written by save_pretrained, or the "
                "name of a causal language model on the Hugging Face Hub; `lachesis model build` makes a tiny one"
            )
        try:
            config = AutoConfig.from_pretrained(source)
            self.tokenizer = AutoTokenizer.from_pretrained(source)
            self.module = AutoModelForCausalLM.from_pretrained(source, config=config, dtype=torch.float32)
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
        self.accepts = set(inspect.signature(self.module.forward).parameters)


def _eos_ids(module: Any, tokenizer: Any) -> frozenset[int]:
    ids = getattr(module.generation_config, "eos_token_id", None)
    found = set(ids if isinstance(ids, list) else [ids]) | {tokenizer.eos_token_id}
    return frozenset(int(one) for one in found if one is not None)


class SamplingModel:
    """The copy that generates. `use` folds a snapshot in, or takes it out."""

    def __init__(self, base: BaseModel) -> None:
        shared = {id(tensor): tensor for tensor in (*base.module.parameters(), *base.module.buffers())}
        self.base = base
        self.module = copy.deepcopy(base.module, shared)
        self._linears = {name: module for name, module in self.module.named_modules() if is_linear(module)}
        self._originals = {name: module.weight for name, module in self._linears.items()}
        self._current: Snapshot | None = None

    @torch.inference_mode()
    def use(self, snapshot: Snapshot | None) -> None:
        """Make `snapshot` (None: the base model) the weights of the next generations."""
        if snapshot is self._current:
            return
        for name in self._current.factors if self._current else ():
            self._linears[name].weight = self._originals[name]
        if snapshot:
            for name, (a, b) in snapshot.factors.items():
                linear = self._linears[name]
                if isinstance(linear, Conv1D):  # GPT-2 keeps its weights transposed
                    a, b = b.T, a.T
                folded = torch.addmm(self._originals[name], b, a, alpha=snapshot.scale)
                linear.weight = torch.nn.Parameter(folded, requires_grad=False)
        self._current = snapshot


def is_linear(module: Any) -> bool:
    return isinstance(module, torch.nn.Linear | Conv1D)
