"""Forecast how much memory a model needs, before it is loaded.

The model is built from its configuration on PyTorch's `meta` device, whose tensors have sizes but
no memory, and a training pass runs on it. Adding up the sizes of the tensors that are alive gives
the peak, for every architecture, without a table of formulas. Attention is replaced by a function
that keeps what a fused kernel keeps: queries, keys, values, its output, and one number per query.
"""

import copy
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import FunctionCtx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from transformers import AttentionInterface, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from lachesis.engine.base_model.lora_layers import LoraAdapter, LoraLayers, iterate_parameters
from lachesis.engine.base_model.output_head import MAX_LOGITS_PER_PART, TargetLogprobs
from lachesis.engine.base_model.recomputation import set_recomputation
from lachesis.tinker_server.model_description import LoraSpec

_ATTENTION_NAME = "lachesis_sizes_only"
# Lengths of the two passes from which the bytes of a token and of a pass are computed.
PASS_LENGTHS = (256, 512)
# Copies of an adapter while it trains: parameters, gradients, Adam's two moments, the gradients of
# the pass under way, and two published versions to sample from.
ADAPTER_COPIES = 7


class LiveBytesCounter(TorchDispatchMode):
    """Count the bytes of the tensors that operations have created and that are still alive.

    Args:
        limit_bytes: Raise torch.OutOfMemoryError, as a device does, when more would be alive.
    """

    def __init__(self, limit_bytes: float = float("inf")) -> None:
        super().__init__()
        self.live_bytes = self.peak_bytes = 0
        self.limit_bytes = limit_bytes
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        # Models ask whether all positions are consecutive; a tensor without memory cannot tell.
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return 0
        result = func(*args, **(kwargs or {}))
        # A view shares the memory of an argument, such as a weight, and takes none of its own.
        argument_keys = {
            tensor.untyped_storage()._cdata
            for tensor in tree_iter((args, kwargs))
            if isinstance(tensor, torch.Tensor)
        }
        for tensor in tree_iter(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._sizes and storage._cdata not in argument_keys:
                    self._count(storage)
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        """Add a storage to the living bytes; raise OutOfMemoryError beyond the limit."""
        if self.live_bytes + storage.nbytes() > self.limit_bytes:
            raise torch.OutOfMemoryError(
                f"{storage.nbytes()} bytes beyond {self.live_bytes} exceed {self.limit_bytes:.0f}"
            )
        key = storage._cdata
        self._sizes[key] = storage.nbytes()
        self.live_bytes += storage.nbytes()
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        weakref.finalize(storage, self._release, key)

    def _release(self, key: int) -> None:
        self.live_bytes -= self._sizes.pop(key, 0)


@dataclass(frozen=True)
class PassSize:
    """State the bytes of a training pass by its number of tokens, padding included.

    The peak is either where the output head computes a part of the logits, beside all that the
    layers have stored for the gradient, or within a layer.
    """

    layer_bytes_per_token: float
    stored_bytes_per_token: float
    fixed_bytes: float
    logits_bytes_per_token: float
    max_logits_tokens: int

    def compute_bytes(self, num_tokens: int) -> float:
        """Return the peak of a pass over this many tokens."""
        logits_bytes = self.logits_bytes_per_token * min(num_tokens, self.max_logits_tokens)
        return self.fixed_bytes + max(
            self.layer_bytes_per_token * num_tokens,
            self.stored_bytes_per_token * num_tokens + logits_bytes,
        )

    def compute_max_tokens(self, available_bytes: float) -> int:
        """Return how many tokens a pass may have in this many bytes."""
        low, high = 0, 1
        while self.compute_bytes(high) <= available_bytes:
            high *= 2
        while high - low > 1:
            middle = (low + high) // 2
            if self.compute_bytes(middle) <= available_bytes:
                low = middle
            else:
                high = middle
        return low


@dataclass(frozen=True)
class ModelSizes:
    """Hold a model's memory in bytes; `recomputed_pass` stores nothing inside of layers."""

    weights_bytes: int
    adapter_bytes: int
    """One copy of an adapter of the rank, in float32."""
    vocab_size: int
    cache_bytes_per_token: int
    """Keys and values of one token in all layers."""
    plain_pass: PassSize
    recomputed_pass: PassSize

    @property
    def fixed_bytes(self) -> int:
        """Return the memory of the weights and of an adapter in training."""
        return self.weights_bytes + ADAPTER_COPIES * self.adapter_bytes

    def compute_bytes(self, num_tokens: int, num_cached_tokens: int) -> float:
        """Return the least memory for passes over `num_tokens` beside a cache of this size."""
        return (
            self.fixed_bytes
            + self.recomputed_pass.compute_bytes(num_tokens)
            + num_cached_tokens * self.cache_bytes_per_token
        )


def measure_model_sizes(
    config: PreTrainedConfig, *, rank: int, dtype: torch.dtype, bits: int | None = None
) -> ModelSizes:
    """Measure a model of this configuration without loading it.

    Args:
        config: The configuration, as transformers reads it.
        rank: The rank of the adapter on all linear layers.
        dtype: The type of the weights and of the activations.
        bits: 8 or 4 if the weights of linear layers are quantised.
    """
    AttentionInterface.register(_ATTENTION_NAME, _attend_without_values)
    with torch.device("meta"):
        # Building a model writes the attention function into its configuration.
        module = AutoModelForCausalLM.from_config(
            copy.deepcopy(config), dtype=dtype, attn_implementation=_ATTENTION_NAME
        )
    module.eval().requires_grad_(False)
    weights_bytes = sum(weight.nbytes for weight in module.parameters())
    lora_layers = LoraLayers(module)
    adapter = LoraAdapter(lora_layers.create_factors(LoraSpec(rank=rank, seed=0)), 1.0)
    adapter_bytes = 0
    for tensor in iterate_parameters(adapter.factors):
        adapter_bytes += tensor.requires_grad_().nbytes
    if bits:
        weights_bytes -= _count_saved_bytes(module, dtype, bits)
    lora_layers.use_for_training(adapter)
    passes = []
    # The cache is measured last, and layers that compute again use none.
    for recomputes in (True, False):
        set_recomputation(module, recomputes)
        passes.append(_measure_pass(module, adapter))
    return ModelSizes(
        weights_bytes,
        adapter_bytes,
        module.get_input_embeddings().num_embeddings,
        _measure_cache_bytes(module),
        passes[1],
        passes[0],
    )


def _count_saved_bytes(module: PreTrainedModel, dtype: torch.dtype, bits: int) -> int:
    """Return the bytes that quantising saves; output head and embeddings stay as they are."""
    head = module.get_output_embeddings()
    num_quantised = sum(
        layer.weight.numel()
        for layer in module.modules()
        if isinstance(layer, torch.nn.Linear) and layer is not head
    )
    # In 4 bits every 64 weights share a scale, which takes about another half of a bit.
    bits_per_weight = {8: 8.0, 4: 4.5}[bits]
    return int(num_quantised * (dtype.itemsize - bits_per_weight / 8))


def _measure_pass(module: PreTrainedModel, adapter: LoraAdapter) -> PassSize:
    """Run passes of two lengths and return the lines through their memory use."""
    short, long = PASS_LENGTHS
    (short_stored, short_peak), (long_stored, long_peak) = (
        _measure_layers(module, adapter, length) for length in PASS_LENGTHS
    )
    slope = (long_peak - short_peak) / (long - short)
    return PassSize(
        layer_bytes_per_token=slope,
        stored_bytes_per_token=(long_stored - short_stored) / (long - short),
        fixed_bytes=max(0.0, short_peak - slope * short),
        logits_bytes_per_token=_measure_head(module, adapter, short) / short,
        max_logits_tokens=MAX_LOGITS_PER_PART // module.get_input_embeddings().num_embeddings,
    )


def _measure_layers(
    module: PreTrainedModel, adapter: LoraAdapter, num_tokens: int
) -> tuple[int, int]:
    """Return the stored bytes and the peak bytes of a pass through the layers."""
    head = module.get_output_embeddings()
    parameters = [
        tensor
        for path, pair in adapter.factors.items()
        for tensor in pair
        if module.get_submodule(path) is not head
    ]
    ids = torch.zeros(1, num_tokens, dtype=torch.long, device="meta")
    with LiveBytesCounter() as counter:
        states = module.base_model(input_ids=ids, use_cache=False).last_hidden_state
        stored_bytes = counter.live_bytes
        gradients = torch.autograd.grad(states.sum(), parameters, allow_unused=True)
        del states, gradients
    return stored_bytes, counter.peak_bytes


def _measure_head(module: PreTrainedModel, adapter: LoraAdapter, num_tokens: int) -> int:
    """Return the peak of computing log-probabilities from the last states, and their gradient."""
    head = module.get_output_embeddings()
    width = module.get_input_embeddings().weight.shape[1]
    states = torch.zeros(num_tokens, width, dtype=module.dtype, device="meta", requires_grad=True)
    targets = torch.zeros(num_tokens, 1, dtype=torch.long, device="meta")
    parameters = [states]
    for path, pair in adapter.factors.items():
        if module.get_submodule(path) is head:
            parameters += pair
    with LiveBytesCounter() as counter:
        logprobs = TargetLogprobs.apply(head(states).float(), targets)
        torch.autograd.grad(logprobs.sum(), parameters, allow_unused=True)
    peak_bytes: int = counter.peak_bytes
    return peak_bytes


def _measure_cache_bytes(module: PreTrainedModel) -> int:
    """Return the bytes of keys and values of one token in all layers."""
    ids = torch.zeros(1, 2, dtype=torch.long, device="meta")
    with torch.inference_mode(), LiveBytesCounter():
        cache = module.base_model(input_ids=ids, use_cache=True).past_key_values
    num_bytes = 0
    for layer in cache.layers:
        num_bytes += int(layer.keys.nbytes + layer.values.nbytes) // int(layer.keys.shape[2])
    return num_bytes


class _FusedAttentionSizes(torch.autograd.Function):
    """Keep for the gradient what a fused attention kernel keeps; the values mean nothing."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        output = query.new_empty(*query.shape[:-1], value.shape[-1])
        log_normalizers = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, output, log_normalizers)
        return output

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(torch.empty_like(tensor) for tensor in ctx.saved_tensors[:3])


def _attend_without_values(
    module: object,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: object,
    **settings: object,
) -> tuple[torch.Tensor, None]:
    """Take the place of an attention function of transformers: (R, heads, T, size) tensors."""
    output = _FusedAttentionSizes.apply(query, key, value)
    return output.transpose(1, 2).contiguous(), None
