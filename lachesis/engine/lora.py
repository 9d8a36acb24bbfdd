"""LoRA adapters (Hu et al. 2021, arXiv:2106.09685) on one base model: many at once, for training and for sampling.

A linear layer W with an adapter gives x W' + scale * x A' B', A (rank, in), B (out, rank), B = 0 at first (eq. 3). Alpha is 32
at every rank, as on the Tinker service, so the scale is 32 / rank. The base model is in memory once and is never changed: each
of its linear layers has a site, which adds the adapters that are in use. Files have the names and keys of PEFT.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from lachesis.base.errors import EngineRequestError

ALPHA = 32
MOST_RANK = 512
_PREFIX = "base_model.model."
Factors = dict[str, tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class LoraSpec:
    """What a client asked for. `seed` fixes the initialisation of A."""

    rank: int = 32
    seed: int | None = None
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def scale(self) -> float:
        return ALPHA / self.rank


@dataclass(frozen=True, eq=False)
class Snapshot:
    """A frozen adapter: A (rank, in) and B (out, rank) by the path of the linear layer, float32."""

    factors: Factors
    scale: float


_BASE = object()
Part = tuple[torch.Tensor | None, Snapshot | None]
"""Rows of a batch (None: all) and what they are sampled with (None: the base model)."""


class Site:
    """Stands in for the `forward` of one linear layer."""

    def __init__(self, linear: Any) -> None:
        self.linear = linear
        self.plain = linear.forward
        self.parts: tuple[tuple[torch.Tensor | None, torch.Tensor, torch.Tensor, float], ...] = ()
        self.folded: torch.Tensor | None = None
        self._room: torch.Tensor | None = None
        self.rows = lambda: 0
        """How many sequences the pass under way has; 0 if each row of the input is one."""

    @property
    def weight(self) -> torch.Tensor:
        """(out, in); GPT-2 keeps its weights transposed."""
        return self.linear.weight.T if isinstance(self.linear, Conv1D) else self.linear.weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.folded is not None:
            return functional.linear(x, self.folded, self.linear.bias)
        y = self.plain(x)
        for rows, a, b, scale in self.parts:
            if rows is None:
                y = _add(y, x, a, b, scale)
            else:
                # A mixture of experts hands the tokens of all sequences over in one row.
                count = self.rows() or len(x)
                each = x.reshape(count, -1, x.shape[-1])
                out = y.view(count, -1, y.shape[-1])
                out.index_copy_(0, rows, _add(out[rows], each[rows], a, b, scale))
        return y

    def fold(self, a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
        """The layer's weight with an adapter in it. It is kept in one place, so the one before is gone."""
        if self._room is None:
            self._room = torch.empty_like(self.weight, memory_format=torch.contiguous_format)
        return torch.addmm(self.weight, b.to(self.weight.dtype), a.to(self.weight.dtype), alpha=scale, out=self._room)


def _add(y: torch.Tensor, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    inner = functional.linear(x.to(a.dtype), a)
    if y.dtype != a.dtype:
        return y + (scale * functional.linear(inner, b)).to(y.dtype)
    return torch.addmm(y.reshape(-1, b.shape[0]), inner.reshape(-1, a.shape[0]), b.T, alpha=scale).view(y.shape)


class Sites:
    """The linear layers of one model. Only the model thread may call this."""

    MOST_FOLDED = 2**29
    """Bytes of a second set of weights, with an adapter folded in; a larger model adds its adapters as it goes."""
    FOLD_AFTER = 8
    """Passes with one adapter alone before it is folded in: less than that does not pay for the folding."""

    def __init__(self, module: Any) -> None:
        self._parts = _classify(module)
        self._modules = [path for path, _ in module.named_modules()]
        self._sites = {path: Site(module.get_submodule(path)) for path in self._parts}
        self.rows = 0
        """Sequences of the pass under way; 0 where the head is used alone, on selected states."""
        for path, site in self._sites.items():
            module.get_submodule(path).forward = site
            site.rows = lambda: self.rows
        self.transposed = any(isinstance(site.linear, Conv1D) for site in self._sites.values())
        self._small = sum(site.weight.nbytes for site in self._sites.values()) <= self.MOST_FOLDED
        self._in_use: object = None
        self._folded_key = object()
        self._folded: Snapshot | None = None
        self._alone: tuple[Snapshot | None, int] = (None, 0)

    @property
    def shapes(self) -> dict[str, tuple[int, int]]:
        """Output and input size of every layer that can be adapted."""
        return {path: tuple(site.weight.shape) for path, site in self._sites.items()}  # type: ignore[misc]

    def new_factors(self, spec: LoraSpec) -> Factors:
        """A fresh adapter, which leaves the model's output unchanged. A is uniform as in PEFT (Kaiming with a = sqrt 5: bounds
        1 / sqrt(in)). Raises EngineRequestError for an impossible spec."""
        if not 1 <= spec.rank <= MOST_RANK:
            raise EngineRequestError(f"LoRA rank is {spec.rank}; allowed: 1 to {MOST_RANK}")
        generator = torch.Generator()
        generator.manual_seed(spec.seed % 2**63) if spec.seed is not None else generator.seed()
        factors = {}
        for path in self._chosen(spec):
            weight = self._sites[path].weight
            out, width = weight.shape
            a = (torch.rand(spec.rank, width, generator=generator) * 2 - 1) / math.sqrt(width)
            factors[path] = (a.to(weight.device), torch.zeros(out, spec.rank, device=weight.device))
        return factors

    def _chosen(self, spec: LoraSpec) -> list[str]:
        wanted = {"attn": spec.train_attn, "mlp": spec.train_mlp, "unembed": spec.train_unembed}
        chosen = [path for path, part in self._parts.items() if wanted[part]]
        if not chosen:
            parts = ", ".join(f"train_{part}" for part in sorted(set(self._parts.values())))
            raise EngineRequestError(f"a LoRA adapter of this model must train at least one of {parts}")
        return chosen

    def check(self, factors: Factors, where: str) -> None:
        """Raises EngineRequestError for an adapter of another model."""
        for path, (a, b) in factors.items():
            shape = tuple(self._sites[path].weight.shape) if path in self._sites else None
            if shape != (b.shape[0], a.shape[1]):
                raise EngineRequestError(
                    f"{where}: {path} is for a layer of {b.shape[0]} x {a.shape[1]}; this model has {shape}"
                )

    def train(self, snapshot: Snapshot) -> None:
        """The next passes go through this adapter, for all rows, never folded."""
        self._use([(None, snapshot)], key=snapshot)

    def sample(self, parts: Sequence[Part]) -> None:
        """The next passes go through these adapters, each for its rows."""
        whole = len(parts) == 1 and parts[0][0] is None
        alone = parts[0][1] if whole else None
        self._alone = (alone, self._alone[1] + 1 if alone is self._alone[0] else 0)
        if alone is not None and self._small and (alone is self._folded or self._alone[1] >= self.FOLD_AFTER):
            self._use_folded(alone)
        else:
            self._use(parts, key=(alone or _BASE) if whole else parts)

    def _use(self, parts: Sequence[Part], key: object) -> None:
        if key is self._in_use:
            return
        self._in_use = key
        for path, site in self._sites.items():
            found = [(rows, *one.factors[path], one.scale) for rows, one in parts if one is not None and path in one.factors]
            site.parts, site.folded = tuple(found), None

    def _use_folded(self, snapshot: Snapshot) -> None:
        if self._in_use is self._folded_key and snapshot is self._folded:
            return
        self._in_use = self._folded_key
        for path, site in self._sites.items():
            site.parts, site.folded = (), None
            if path in snapshot.factors:
                site.folded = site._room if snapshot is self._folded else site.fold(*snapshot.factors[path], snapshot.scale)
        self._folded = snapshot

    def forget(self) -> None:
        """Hold on to no adapter: its session has ended."""
        self._use([], key=_BASE)
        self._folded, self._alone = None, (None, 0)

    def leave_out(self, paths: Iterable[str]) -> None:
        """Never adapt these layers."""
        for path in paths:
            site = self._sites.pop(path)
            site.linear.forward = site.plain
            del self._parts[path]

    def target_modules(self, factors: Mapping[str, object]) -> list[str]:
        """The layers of an adapter as PEFT wants them named: by last name where that is unambiguous, else by full path."""
        short = {path.rsplit(".", 1)[-1] for path in factors}
        ambiguous = any(path not in factors and path.rsplit(".", 1)[-1] in short for path in self._modules)
        return sorted(factors if ambiguous else short)


def _classify(module: Any) -> dict[str, str]:
    """Every linear layer's path and its part of the model: attn, mlp or unembed."""
    head = module.get_output_embeddings()
    parts: dict[str, str] = {}
    for path, layer in module.named_modules():
        if isinstance(layer, torch.nn.Linear | Conv1D) and not path.endswith((".gate", ".router")):  # a mixture's router stays
            attention = "attn" in path or "attention" in path
            parts[path] = "unembed" if layer is head else "attn" if attention else "mlp"
    return parts


def parameters(factors: Factors) -> Iterator[torch.Tensor]:
    """A and B of every layer, in a fixed order."""
    for a, b in factors.values():
        yield a
        yield b


def to_tensors(factors: Factors) -> dict[str, torch.Tensor]:
    """The adapter under PEFT's keys, on the CPU."""
    return {
        f"{_PREFIX}{path}.lora_{name}.weight": value.detach().cpu().contiguous().clone()
        for path, pair in factors.items()
        for name, value in zip("AB", pair, strict=True)
    }


def from_tensors(tensors: dict[str, torch.Tensor], device: torch.device) -> Factors:
    """The adapter of a PEFT file."""
    found: Factors = {}
    for key, value in tensors.items():
        if key.endswith(".lora_A.weight"):
            path = key.removeprefix(_PREFIX).removesuffix(".lora_A.weight")
            found[path] = (value.to(device), tensors[key.replace(".lora_A.", ".lora_B.")].to(device))
    return found


def peft_config(rank: int, target_modules: list[str], source: str, *, transposed: bool) -> dict[str, Any]:
    """The content of `adapter_config.json`."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": source,
        "r": rank,
        "lora_alpha": ALPHA,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": transposed,
        "inference_mode": True,
        "target_modules": target_modules,
    }
