"""Compare a base model, as this engine uses it, with the model's own code before it is served.

Families of models differ in their attention windows, in the names of their layers, and in which of
them PEFT can adapt. A model for which this engine would silently compute something else is refused.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from peft import LoraConfig, get_peft_model
from peft.utils.transformers_weight_conversion import (
    convert_peft_adapter_state_dict_for_transformers,
)
from transformers import AutoModelForCausalLM

from lachesis.base.errors import UnsupportedModelError
from lachesis.engine.base_model.lora_layers import AdapterAssignment, LoraAdapter
from lachesis.engine.sampling.kv_cache import SlotCache

if TYPE_CHECKING:
    from lachesis.engine.base_model.forward_pass import BaseLanguageModel


log = logging.getLogger(__name__)
# Maximum difference of log-probabilities in nats, times the largest logit where that is above 1.
MAX_LOGPROB_DIFFERENCE = 1e-3
# The limit is this many times larger in bfloat16, which has about three significant digits, and
# holds for the root of the mean square: among 150,000 tokens some always differ by more.
BFLOAT16_FACTOR = 20
# Number of tokens to compare if no window or chunk is longer than SHORT_WINDOW.
NUM_COMPARED_TOKENS = 24
SHORT_WINDOW = 8
# Number of tokens to compare after the longest window that cannot be shortened.
NUM_TOKENS_BEYOND_WINDOW = 4
# Scale of the random adapter's effect: large enough to notice where the adapter is left out.
RANDOM_ADAPTER_EFFECT = 1.0
# How much the tiny training step should lower the loss, in nats per token.
TARGET_LOSS_DECREASE = 1e-3
MAX_TRIES = 3
# Fields from which masks are made in each pass, so that a check may shorten the windows.
ADJUSTABLE_WINDOW_FIELDS = ("sliding_window", "attention_chunk_size")
# Fields that a model reads only when it is created.
FIXED_WINDOW_FIELDS = ("window_size", "sliding_window_size", "attention_window_size")
# Families that `make families` found to differ although the checks at startup find nothing.
REJECTED_FAMILIES = {
    "hrm_text": "its log-probabilities after one training step differ by 0.16 nats from those of "
    "PyTorch and PEFT (it leaves most of its cycles out of the gradient; allowed: 0.001)"
}


def verify_base_model(base: BaseLanguageModel) -> None:
    """Compare layers, sampling and training with PEFT and the model's own code.

    Raises:
        UnsupportedModelError: Something differs, or the model cannot be used in this way at all.
    """
    try:
        check_layers(base)
        with torch.inference_mode():
            check_sampling(base)
        check_training(base)
    except UnsupportedModelError:
        raise
    except Exception as error:
        reason = (
            f"a pass over {NUM_COMPARED_TOKENS} tokens fails with {type(error).__name__}: {error}"
        )
        raise _make_unsupported_error(base, reason) from error


def check_layers(base: BaseLanguageModel) -> None:
    """Adapt the layers that PEFT adapts for the names in an exported adapter, and no others.

    Raises:
        UnsupportedModelError: PEFT refuses the names or adapts none of these layers, or the family
            is known to differ.
    """
    if base.module.config.model_type in REJECTED_FAMILIES:
        raise _make_unsupported_error(base, REJECTED_FAMILIES[base.module.config.model_type])
    for _ in range(2):
        try:
            adapted = find_peft_adapted_layers(
                base.module.config, base.lora_layers.find_target_modules(base.lora_layers.shapes)
            )
        except Exception as error:
            raise _make_unsupported_error(
                base, f"PEFT cannot load its adapters: {error}"
            ) from error
        excluded = set(base.lora_layers.shapes) - adapted
        if not excluded:
            break
        log.info(
            "%d layers are not adapted: PEFT cannot load them: %s",
            len(excluded),
            sorted(excluded)[:3],
        )
        base.lora_layers.exclude_layers(excluded)
        if not base.lora_layers.shapes:
            raise _make_unsupported_error(base, "PEFT cannot load an adapter of any layer")
    if adapted != set(base.lora_layers.shapes):
        raise _make_unsupported_error(
            base,
            f"PEFT adapts {len(adapted)} layers and this engine adapts "
            f"{len(base.lora_layers.shapes)} "
            f"({sorted(adapted ^ set(base.lora_layers.shapes))[:3]} differ)",
        )


def check_sampling(base: BaseLanguageModel) -> None:
    """Compare sequences that are extended token by token with one pass of the model over each.

    Two sequences of different lengths are in one batch, the longer one beyond every window and
    chunk, first without adapters and then each with one of its own.

    Raises:
        UnsupportedModelError: The log-probabilities differ, or cannot be computed in this way.
    """
    with _shorten_windows(base):
        num_tokens = min(
            base.context_length,
            max(NUM_COMPARED_TOKENS, _find_fixed_window(base) + NUM_TOKENS_BEYOND_WINDOW),
        )
        sequences = [
            _make_tokens(base, num_tokens, 7),
            _make_tokens(base, max(3, num_tokens // 3), 5),
        ]
        expected = [_compute_last_logits(base, sequence, None) for sequence in sequences]
        base.detect_separate_head(sequences[1])
        _compare_decoded(base, sequences, [None, None], expected, "of the base model")
        if not base.is_exact:
            return  # The effect of random adapters is smaller than the errors of bfloat16.
        adapters: list[LoraAdapter | None] = [_make_random_adapter(base, seed) for seed in (1, 2)]
        expected = [
            _compute_last_logits(base, sequence, adapter)
            for sequence, adapter in zip(sequences, adapters, strict=True)
        ]
        _compare_decoded(base, sequences, adapters, expected, "with two adapters in one batch")
        base.lora_layers.clear_adapters()


def check_training(base: BaseLanguageModel) -> None:
    """Take tiny steps along the gradient of an adapter and compare the change of the loss with the
    slope.

    A step may cross a border at which a mixture of experts chooses other experts, so there are
    three tries.

    Raises:
        UnsupportedModelError: There is no gradient, or the loss changes by a different amount.
    """
    for seed in range(MAX_TRIES):
        squared_norm, loss_decrease = _take_tiny_step(base, seed)
        if TARGET_LOSS_DECREASE / 3 < loss_decrease < 3 * TARGET_LOSS_DECREASE:
            return
    if base.is_exact or not squared_norm:
        raise _make_unsupported_error(
            base,
            f"a training step lowers the loss by {loss_decrease:.2g} nats, but its gradient, of "
            f"norm {squared_norm**0.5:.2g}, predicts {TARGET_LOSS_DECREASE:.2g}",
        )


def _take_tiny_step(base: BaseLanguageModel, seed: int) -> tuple[float, float]:
    """Return the squared norm of the gradient, and by how much a step along it lowers the loss."""
    adapter = _make_random_adapter(base, seed)
    weights = [weight.requires_grad_() for pair in adapter.factors.values() for weight in pair]
    tokens = _make_tokens(base, min(base.context_length, NUM_COMPARED_TOKENS), 7)
    base.lora_layers.use_for_training(adapter)
    loss = _compute_loss(base, tokens)
    squared_norm = 0.0
    if loss.requires_grad:
        gradients = torch.autograd.grad(loss, weights, allow_unused=True, materialize_grads=True)
        squared_norm = sum(float(gradient.square().sum()) for gradient in gradients)
    losses = [0.0, 0.0]
    if 0 < squared_norm < float("inf"):
        # With half a step to either side the curvature of the loss cancels out.
        for index, step_fraction in enumerate((0.5, -1.0)):
            with torch.no_grad():
                for weight, gradient in zip(weights, gradients, strict=True):
                    weight += step_fraction * TARGET_LOSS_DECREASE / squared_norm * gradient
                losses[index] = float(_compute_loss(base, tokens))
    base.lora_layers.clear_adapters()
    return squared_norm, losses[0] - losses[1]


def _compare_decoded(
    base: BaseLanguageModel,
    sequences: list[torch.Tensor],
    adapters: list[LoraAdapter | None],
    expected: list[torch.Tensor],
    case: str,
) -> None:
    """Raise UnsupportedModelError if tokens that are decoded one by one differ from one pass."""
    try:
        decoded = _decode_last_tokens(base, sequences, adapters)
    except Exception as error:
        raise _make_unsupported_error(
            base, f"it cannot be sampled with a cache: {error}"
        ) from error
    for name, actual, reference in zip(("long", "short"), decoded, expected, strict=True):
        limit = compute_tolerance(base, reference)
        difference = _measure_logprob_difference(base, actual, reference)
        if not difference <= limit:
            raise _make_unsupported_error(
                base,
                f"log-probabilities {case} differ token by token from those of one pass by "
                f"{difference:.2g} nats (the {name} of two sequences of {len(sequences[0])} "
                f"and {len(sequences[1])} tokens; allowed: {limit:.2g})",
            )


def _decode_last_tokens(
    base: BaseLanguageModel, sequences: list[torch.Tensor], adapters: list[LoraAdapter | None]
) -> list[torch.Tensor]:
    """Return the logits of each row's last token, feeding the last two tokens separately."""
    device = base.device
    slots = torch.arange(len(sequences), device=device)
    assignments: list[AdapterAssignment] = [
        (slots[index : index + 1], adapter)
        for index, adapter in enumerate(adapters)
        if adapter is not None
    ]
    base.lora_layers.use_for_sampling(assignments or [(None, None)])
    lengths = torch.tensor([len(sequence) - 2 for sequence in sequences], device=device)
    prompts = torch.zeros(len(sequences), len(sequences[0]) - 2, dtype=torch.long, device=device)
    for index, sequence in enumerate(sequences):
        prompts[index, : len(sequence) - 2] = sequence[:-2]
    prompt_cache, slot_cache = base.create_prompt_cache(), SlotCache()
    base.compute_states(prompts, cache=prompt_cache)
    slot_cache.reserve(len(sequences), len(sequences[0]), prompt_cache)
    base.kv_bytes_per_token = sum(
        layer.keys[0, :, 0].nbytes + layer.values[0, :, 0].nbytes for layer in prompt_cache.layers
    )
    slot_cache.fill_slots(0, prompt_cache, slots)
    for tokens_from_end in (2, 1):
        ids = torch.stack([sequence[-tokens_from_end] for sequence in sequences])
        width = len(sequences[0]) - tokens_from_end + 1
        states = base.decode(ids, lengths + (2 - tokens_from_end), slot_cache, slots, width)
    return list(base.compute_logits(states))


def _make_random_adapter(base: BaseLanguageModel, seed: int) -> LoraAdapter:
    """Return an adapter of rank 1 on every layer that is adapted, with a visible effect."""
    generator = torch.Generator().manual_seed(seed)
    factors = {}
    for path, (rows, columns) in base.lora_layers.shapes.items():
        a = torch.randn(1, columns, generator=generator) / columns**0.5
        b = torch.randn(rows, 1, generator=generator) / rows**0.5
        factors[path] = (a.to(base.device), b.to(base.device))
    return LoraAdapter(factors, RANDOM_ADAPTER_EFFECT / len(factors) ** 0.5)


def _compute_loss(base: BaseLanguageModel, tokens: torch.Tensor) -> torch.Tensor:
    """Return the mean negative log-probability of the tokens, by the passes that training uses."""
    logprobs = base.compute_logits(base.compute_states(tokens[None, :-1]))[0].log_softmax(-1)
    return -logprobs.gather(1, tokens[1:, None]).mean()


def _make_tokens(base: BaseLanguageModel, count: int, stride: int) -> torch.Tensor:
    return (torch.arange(1, count + 1, device=base.device) * stride) % base.vocab_size


def _compute_last_logits(
    base: BaseLanguageModel, sequence: torch.Tensor, adapter: LoraAdapter | None
) -> torch.Tensor:
    """Return the logits after a sequence, from one pass of the model over the whole sequence."""
    if adapter is not None:
        base.lora_layers.use_for_sampling([(None, adapter)])
    return _take_last_logits(base.module(input_ids=sequence[None]).logits)


def _take_last_logits(logits: torch.Tensor) -> torch.Tensor:
    return logits[0, -1].float()


def compute_tolerance(base: BaseLanguageModel, logits: torch.Tensor) -> float:
    """Return by how much two ways to compute these logits may differ."""
    largest = float(logits.abs().max().clamp(min=1.0))
    return MAX_LOGPROB_DIFFERENCE * largest * (1 if base.is_exact else BFLOAT16_FACTOR)


def measure_difference(first: torch.Tensor, second: torch.Tensor) -> float:
    """Return the largest absolute difference of two tensors, or infinity if their shapes differ."""
    if first.shape == second.shape:
        return float((first - second).abs().max())
    return float("inf")


def _measure_logprob_difference(
    base: BaseLanguageModel, logits: torch.Tensor, reference: torch.Tensor
) -> float:
    """Return the largest difference of log-probabilities, or the typical one in bfloat16."""
    logprobs, expected = logits.log_softmax(-1), reference.log_softmax(-1)
    if base.is_exact or logprobs.shape != expected.shape:
        return measure_difference(logprobs, expected)
    return float((logprobs - expected).square().mean().sqrt())


@contextlib.contextmanager
def _shorten_windows(base: BaseLanguageModel) -> Iterator[None]:
    """Shorten the windows that masks are made from, so that a few tokens reach beyond them."""
    config = base.module.config.get_text_config()
    original_windows = {
        name: window
        for name in ADJUSTABLE_WINDOW_FIELDS
        if isinstance(window := getattr(config, name, None), int) and window > SHORT_WINDOW
    }
    try:
        for name in original_windows:
            setattr(config, name, SHORT_WINDOW)
        base.read_attention_windows()
        yield
    finally:
        for name, window in original_windows.items():
            setattr(config, name, window)
        base.read_attention_windows()


def _find_fixed_window(base: BaseLanguageModel) -> int:
    config = base.module.config.get_text_config()
    windows = [getattr(config, name, None) for name in FIXED_WINDOW_FIELDS]
    return max([window for window in windows if isinstance(window, int)], default=0)


def _make_unsupported_error(base: BaseLanguageModel, reason: str) -> UnsupportedModelError:
    family: Any = base.module.config.model_type
    return UnsupportedModelError(
        f"the model {base.source} ({family}) cannot be served correctly: {reason}; "
        "allowed: models of a family that agrees in docs/reference/families.md"
    )


def find_peft_adapted_layers(config: object, target_modules: Iterable[str]) -> set[str]:
    """Return the paths of the layers that PEFT adapts in a model of this configuration.

    The model is built without memory for its weights. PEFT itself is asked, because it renames
    targets and tensors in several mixtures of experts: there `gate_proj` of a dense layer means the
    experts.

    Raises:
        Exception: PEFT refuses these targets; the type depends on the reason.
    """
    # PEFT warns about tied weights, which do not matter here because nothing is merged.
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_config(config)
        lora_config = LoraConfig(r=1, target_modules=list(target_modules), task_type="CAUSAL_LM")
        peft_model = get_peft_model(model, lora_config)
        tensors = {
            f"{path}.weight": torch.empty(1, 1)
            for path, _ in peft_model.named_modules()
            if path.endswith((".lora_A.default", ".lora_B.default"))
        }
        tensors = {name.replace(".default.", "."): value for name, value in tensors.items()}
        converted = convert_peft_adapter_state_dict_for_transformers(
            peft_model, lora_config, dict(tensors)
        )
    return {
        name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        for name in set(tensors) & set(converted)
        if name.endswith(".lora_A.weight")
    }
