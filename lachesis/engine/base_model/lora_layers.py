"""Apply LoRA adapters (Hu et al. 2021, arXiv:2106.09685) to one base model, for training and
sampling.

A linear layer W with an adapter computes x W' + scale * x A' B', with A (rank, in), B (out, rank),
and B = 0 at first (eq. 3). Alpha is 32 at every rank, as in the Tinker service, so the scale is 32
/ rank. The base model is in memory once and never changes: each of its linear layers adds the
adapters in use. Files have the names and keys of PEFT.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from lachesis.base.errors import EngineRequestError
from lachesis.tinker_server.model_description import ALPHA, MAX_RANK, LoraSpec

_PEFT_KEY_PREFIX = "base_model.model."
Factors = dict[str, tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True, eq=False)
class LoraAdapter:
    """Hold a frozen adapter: A (rank, in) and B (out, rank) by the path of the linear layer, in
    float32 or in the type of the base model.
    """

    factors: Factors
    scale: float


_BASE_MODEL_KEY = object()
# Rows of a batch (None for all rows), and the adapter that they use (None for the base model).
AdapterAssignment = tuple[torch.Tensor | None, LoraAdapter | None]


class LoraLinear:
    """Replace the `forward` method of one linear layer."""

    def __init__(self, linear: Any) -> None:
        self.linear = linear
        self.original_forward = linear.forward
        self.active_adapters: tuple[
            tuple[torch.Tensor | None, torch.Tensor, torch.Tensor, float], ...
        ] = ()
        self.merged_weight: torch.Tensor | None = None
        self._merge_buffer: torch.Tensor | None = None
        # Returns the number of sequences of the current pass; 0 if each input row is one.
        self.get_num_sequences = lambda: 0

    @property
    def weight(self) -> torch.Tensor:
        """Return the weight (out, in); GPT-2 stores its weights transposed."""
        if isinstance(self.linear, Conv1D):
            return self.linear.weight.T
        return self.linear.weight

    @property
    def shape(self) -> tuple[int, int]:
        """Return the output and input size; a quantised weight has another shape."""
        if isinstance(self.linear, Conv1D):
            return self.linear.nf, self.linear.nx
        return self.linear.out_features, self.linear.in_features

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.merged_weight is not None:
            return functional.linear(x, self.merged_weight, self.linear.bias)
        y = self.original_forward(x)
        for rows, a, b, scale in self.active_adapters:
            if rows is None:
                y = _add_lora_output(y, x, a, b, scale)
            else:
                # A mixture of experts passes the tokens of all sequences in one row.
                num_sequences = self.get_num_sequences() or len(x)
                grouped_inputs = x.reshape(num_sequences, -1, x.shape[-1])
                grouped_outputs = y.view(num_sequences, -1, y.shape[-1])
                grouped_outputs.index_copy_(
                    0,
                    rows,
                    _add_lora_output(grouped_outputs[rows], grouped_inputs[rows], a, b, scale),
                )
        return y

    def merge(self, a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
        """Return the layer's weight with an adapter merged; the last merged weight is kept."""
        if self._merge_buffer is None:
            self._merge_buffer = torch.empty_like(
                self.weight, memory_format=torch.contiguous_format
            )
        return torch.addmm(
            self.weight,
            b.to(self.weight.dtype),
            a.to(self.weight.dtype),
            alpha=scale,
            out=self._merge_buffer,
        )


def _add_lora_output(
    y: torch.Tensor, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float
) -> torch.Tensor:
    """Return `y` (rows, out) plus the output of an adapter on `x` (rows, in)."""
    # In training adapters are float32 whatever the base model is, so that small updates are not
    # lost. Frozen ones have the type of the model, which takes a third of the operations.
    inner = functional.linear(x.to(a.dtype), a)
    if y.dtype != a.dtype:
        return y + functional.linear(scale * inner, b).to(y.dtype)
    return torch.addmm(
        y.reshape(-1, b.shape[0]), inner.reshape(-1, a.shape[0]), b.T, alpha=scale
    ).view(y.shape)


class LoraLayers:
    """Manage the linear layers of one model. Only the model thread may call this."""

    # Maximum size of a second set of weights with an adapter merged in; a larger model adds its
    # adapters in each pass.
    MAX_MERGED_BYTES = 2**29
    # Number of passes with one single adapter before it is merged; merging for fewer passes would
    # not pay off.
    MERGE_AFTER_PASSES = 8

    def __init__(self, module: Any) -> None:
        self._components = _classify_linear_layers(module)
        self._module_paths = [path for path, _ in module.named_modules()]
        self._layers = {path: LoraLinear(module.get_submodule(path)) for path in self._components}
        # Sequences of the current pass; 0 if the head is applied to selected states.
        self.num_sequences = 0
        for path, layer in self._layers.items():
            module.get_submodule(path).forward = layer
            layer.get_num_sequences = lambda: self.num_sequences
        self.transposed = any(isinstance(layer.linear, Conv1D) for layer in self._layers.values())
        weights = [layer.weight for layer in self._layers.values()]
        self._can_merge = (
            all(weight.is_floating_point() for weight in weights)
            and sum(weight.nbytes for weight in weights) <= self.MAX_MERGED_BYTES
        )
        self._active_key: object = None
        self._merged_key = object()
        self._merged_adapter: LoraAdapter | None = None
        self._sole_adapter_passes: tuple[LoraAdapter | None, int] = (None, 0)

    @property
    def shapes(self) -> dict[str, tuple[int, int]]:
        """Return the output and input size of every layer that can be adapted."""
        return {path: layer.shape for path, layer in self._layers.items()}

    def create_factors(self, spec: LoraSpec) -> Factors:
        """Return a new adapter, which leaves the model's output unchanged.

        A is uniform as in PEFT (Kaiming with a = sqrt 5: bounds 1 / sqrt(in)).

        Raises:
            EngineRequestError: The rank is out of range, or the adapter would train no layer.
        """
        if not 1 <= spec.rank <= MAX_RANK:
            raise EngineRequestError(f"LoRA rank is {spec.rank}; allowed: 1 to {MAX_RANK}")
        generator = torch.Generator()
        generator.manual_seed(spec.seed % 2**63) if spec.seed is not None else generator.seed()
        factors = {}
        for path in self._select_layers(spec):
            weight, (out, width) = self._layers[path].weight, self._layers[path].shape
            a = (torch.rand(spec.rank, width, generator=generator) * 2 - 1) / math.sqrt(width)
            # B is zero, so the new adapter adds nothing yet.
            factors[path] = (a.to(weight.device), torch.zeros(out, spec.rank, device=weight.device))
        return factors

    def _select_layers(self, spec: LoraSpec) -> list[str]:
        """Return the paths of the layers that a new adapter trains; raise if there is none."""
        is_trained = {"attn": spec.train_attn, "mlp": spec.train_mlp, "unembed": spec.train_unembed}
        selected_paths = [
            path for path, component in self._components.items() if is_trained[component]
        ]
        if not selected_paths:
            flag_names = ", ".join(
                f"train_{component}" for component in sorted(set(self._components.values()))
            )
            raise EngineRequestError(
                f"a LoRA adapter of this model must train at least one of {flag_names}"
            )
        return selected_paths

    def check_factors(self, factors: Factors, source: str) -> None:
        """Raise EngineRequestError for an adapter of another model."""
        for path, (a, b) in factors.items():
            if path in self._layers:
                shape = self._layers[path].shape
            else:
                shape = None
            if shape != (b.shape[0], a.shape[1]):
                raise EngineRequestError(
                    f"{source}: {path} is for a layer of {b.shape[0]} x {a.shape[1]}; this model "
                    f"has {shape}"
                )

    def use_for_training(self, adapter: LoraAdapter) -> None:
        """Use this adapter for all rows of the next passes, without merging it."""
        self._activate([(None, adapter)], key=adapter)

    def use_for_sampling(self, assignments: Sequence[AdapterAssignment]) -> None:
        """Use these adapters in the next passes, each for its rows."""
        covers_all_rows = len(assignments) == 1 and assignments[0][0] is None
        sole_adapter = assignments[0][1] if covers_all_rows else None
        self._sole_adapter_passes = (
            sole_adapter,
            self._sole_adapter_passes[1] + 1 if sole_adapter is self._sole_adapter_passes[0] else 0,
        )
        if (
            sole_adapter is not None
            and self._can_merge
            and (
                sole_adapter is self._merged_adapter
                or self._sole_adapter_passes[1] >= self.MERGE_AFTER_PASSES
            )
        ):
            self._activate_merged(sole_adapter)
        else:
            self._activate(
                assignments,
                key=(sole_adapter or _BASE_MODEL_KEY) if covers_all_rows else assignments,
            )

    def _activate(self, assignments: Sequence[AdapterAssignment], key: object) -> None:
        """Let each layer add the adapters of these rows; `key` names the assignment."""
        if key is self._active_key:
            return
        self._active_key = key
        for path, layer in self._layers.items():
            active_adapters = [
                (rows, *adapter.factors[path], adapter.scale)
                for rows, adapter in assignments
                if adapter is not None and path in adapter.factors
            ]
            layer.active_adapters, layer.merged_weight = tuple(active_adapters), None

    def _activate_merged(self, adapter: LoraAdapter) -> None:
        """Let each layer use merged weights, and keep those of the last adapter."""
        if self._active_key is self._merged_key and adapter is self._merged_adapter:
            return
        self._active_key = self._merged_key
        for path, layer in self._layers.items():
            layer.active_adapters, layer.merged_weight = (), None
            if path in adapter.factors:
                if adapter is self._merged_adapter:
                    layer.merged_weight = layer._merge_buffer
                else:
                    layer.merged_weight = layer.merge(*adapter.factors[path], adapter.scale)
        self._merged_adapter = adapter

    def clear_adapters(self) -> None:
        """Drop the references to all adapters, so that those of ended sessions are freed."""
        self._activate([], key=_BASE_MODEL_KEY)
        self._merged_adapter, self._sole_adapter_passes = None, (None, 0)

    def exclude_layers(self, paths: Iterable[str]) -> None:
        """Never adapt these layers."""
        for path in paths:
            layer = self._layers.pop(path)
            layer.linear.forward = layer.original_forward
            del self._components[path]

    def find_target_modules(self, factors: Mapping[str, object]) -> list[str]:
        """Return the names of an adapter's layers for PEFT: last parts, or paths if ambiguous."""
        last_names = {path.rsplit(".", 1)[-1] for path in factors}
        is_ambiguous = any(
            path not in factors and path.rsplit(".", 1)[-1] in last_names
            for path in self._module_paths
        )
        return sorted(factors if is_ambiguous else last_names)


def _classify_linear_layers(module: Any) -> dict[str, str]:
    """Return every linear layer's path and its part of the model: attn, mlp or unembed."""
    head = module.get_output_embeddings()
    components: dict[str, str] = {}
    for path, layer in module.named_modules():
        # The router of a mixture of experts is not adapted.
        if isinstance(layer, torch.nn.Linear | Conv1D) and not path.endswith((".gate", ".router")):
            is_attention = "attn" in path or "attention" in path
            if layer is head:
                components[path] = "unembed"
            elif is_attention:
                components[path] = "attn"
            else:
                components[path] = "mlp"
    return components


def iterate_parameters(factors: Factors) -> Iterator[torch.Tensor]:
    """Yield A and B of every layer in a fixed order."""
    for a, b in factors.values():
        yield a
        yield b


def to_tensors(factors: Factors) -> dict[str, torch.Tensor]:
    """Return the adapter under PEFT's keys, on the CPU."""
    return {
        f"{_PEFT_KEY_PREFIX}{path}.lora_{name}.weight": value.detach().cpu().contiguous().clone()
        for path, pair in factors.items()
        for name, value in zip("AB", pair, strict=True)
    }


def from_tensors(
    tensors: dict[str, torch.Tensor], device: torch.device, dtype: torch.dtype = torch.float32
) -> Factors:
    """Return the adapter in a PEFT file."""
    factors: Factors = {}
    for key, a in tensors.items():
        if key.endswith(".lora_A.weight"):
            path = key.removeprefix(_PEFT_KEY_PREFIX).removesuffix(".lora_A.weight")
            b = tensors[key.replace(".lora_A.", ".lora_B.")]
            factors[path] = (a.to(device, dtype), b.to(device, dtype))
    return factors


def make_peft_config(
    rank: int, target_modules: list[str], source: str, *, transposed: bool
) -> dict[str, Any]:
    """Return the content of PEFT's `adapter_config.json` for an adapter."""
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
