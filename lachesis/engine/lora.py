"""LoRA adapters for training: many on one base model, each with its own optimizer.

The layers, their initialisation (B = 0) and the file format are PEFT's. Alpha is 32 at every rank, as on the Tinker
service, so the scale is 32 / rank.
"""

from __future__ import annotations

import warnings
from dataclasses import asdict, dataclass
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from peft.tuners.lora import LoraLayer

from lachesis.engine.model import BaseModel, Snapshot, is_linear
from lachesis.errors import EngineRequestError

ALPHA = 32
_PREFIX = "base_model.model."


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


def _classify(base: BaseModel) -> dict[str, str]:
    """Every linear layer's path and its part of the model: attn, mlp or unembed."""
    head = base.module.get_output_embeddings()
    parts: dict[str, str] = {}
    for path, module in base.module.named_modules():
        if is_linear(module) and not path.endswith((".gate", ".router")):  # a mixture's router stays as it is
            attention = "attn" in path or "attention" in path
            parts[path] = "unembed" if module is head else "attn" if attention else "mlp"
    return parts


def _target_modules(parts: dict[str, str], spec: LoraSpec) -> list[str]:
    """The layers that `spec` trains, by last name where that is unambiguous, else by full path."""
    wanted = {"attn": spec.train_attn, "mlp": spec.train_mlp, "unembed": spec.train_unembed}
    chosen = [path for path, part in parts.items() if wanted[part]]
    if not chosen:
        raise EngineRequestError("a LoRA adapter must train at least one of train_attn, train_mlp, train_unembed")
    short = {path.rsplit(".", 1)[-1] for path in chosen}
    ambiguous = any(not wanted[part] and path.rsplit(".", 1)[-1] in short for path, part in parts.items())
    return sorted(chosen if ambiguous else short)


class Adapters:
    """The adapters in training. Only the model thread may call this."""

    def __init__(self, base: BaseModel) -> None:
        self.base = base
        self._parts = _classify(base)
        self._peft: PeftModel | None = None
        self._active = ""
        self._layers_of: dict[str, dict[str, Any]] = {}
        self._specs: dict[str, LoraSpec] = {}

    def add(self, name: str, spec: LoraSpec) -> None:
        """A fresh adapter that leaves the model's output unchanged. Raises EngineRequestError for an impossible spec."""
        if not 1 <= spec.rank <= 512:
            raise EngineRequestError(f"LoRA rank is {spec.rank}; allowed: 1 to 512")
        config = LoraConfig(
            r=spec.rank,
            lora_alpha=ALPHA,
            lora_dropout=0.0,
            target_modules=_target_modules(self._parts, spec),
            task_type="CAUSAL_LM",
        )
        with warnings.catch_warnings(), torch.random.fork_rng(enabled=spec.seed is not None):
            warnings.simplefilter("ignore")  # PEFT warns of tied embeddings; the adapter is exported unmerged
            if spec.seed is not None:
                torch.manual_seed(spec.seed)
            if self._peft is None:
                self._peft = get_peft_model(self.base.module, config, adapter_name=name)
            else:
                self._peft.add_adapter(name, config)
        self._specs[name] = spec
        self._active = ""
        self._layers_of[name] = self._find_layers(name)

    def remove(self, name: str) -> None:
        if self._peft is not None and name in self._specs:
            if len(self._specs) > 1:  # PEFT keeps at least one adapter
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # that another adapter becomes active; `activate` decides that
                    self._peft.delete_adapter(name)
            else:
                self._peft.unload()
                self._peft = None
            del self._specs[name], self._layers_of[name]
            self._active = ""

    def activate(self, name: str) -> torch.nn.Module:
        """The model with this adapter in its forward pass, gradients on for it alone."""
        assert self._peft is not None
        if self._active != name:
            self._peft.set_adapter(name)
            self._active = name
        return self._peft

    def parameters(self, name: str) -> list[torch.nn.Parameter]:
        """A and B of every layer, in a fixed order."""
        return [
            parameter
            for layer in self._layers_of[name].values()
            for parameter in (layer.lora_A[name].weight, layer.lora_B[name].weight)
        ]

    def snapshot(self, name: str) -> Snapshot:
        """A copy of the adapter as it is now, for sampling."""
        factors = {
            path: (layer.lora_A[name].weight.detach().clone(), layer.lora_B[name].weight.detach().clone())
            for path, layer in self._layers_of[name].items()
        }
        return Snapshot(factors, scale=ALPHA / self._specs[name].rank)

    def tensors(self, name: str) -> dict[str, torch.Tensor]:
        """The adapter under PEFT's own keys, on the CPU."""
        state = get_peft_model_state_dict(self._peft, adapter_name=name, save_embedding_layers=False)
        return {key: value.detach().cpu().contiguous().clone() for key, value in state.items()}

    def load(self, name: str, tensors: dict[str, torch.Tensor]) -> None:
        set_peft_model_state_dict(self._peft, tensors, adapter_name=name)

    def config(self, name: str) -> dict[str, Any]:
        """The content of `adapter_config.json`."""
        assert self._peft is not None
        config = self._peft.peft_config[name].to_dict()
        config.update(inference_mode=True, base_model_name_or_path=self.base.source)
        return {key: sorted(value) if isinstance(value, set) else value for key, value in config.items()}

    def _find_layers(self, name: str) -> dict[str, Any]:
        assert self._peft is not None
        return {
            path.removeprefix(_PREFIX): module
            for path, module in self._peft.named_modules()
            if isinstance(module, LoraLayer) and name in module.lora_A
        }


def snapshot_from_tensors(tensors: dict[str, torch.Tensor], rank: int, device: torch.device) -> Snapshot:
    """A snapshot from the tensors of a PEFT adapter file."""
    factors: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    for key, value in tensors.items():
        if key.endswith(".lora_A.weight"):
            path = key.removeprefix(_PREFIX).removesuffix(".lora_A.weight")
            b = tensors[key.replace(".lora_A.", ".lora_B.")]
            factors[path] = (value.to(device), b.to(device))
    return Snapshot(factors, scale=ALPHA / rank)
