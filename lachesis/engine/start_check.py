"""Compare a base model, as this engine uses it, with the model's own code, before it is served.

Families of models differ in how they look back, how their layers are called and which of them PEFT
can adapt. What differs here would be sampled or trained wrongly without a word, so it is refused.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from lachesis.base.errors import UnsupportedModelError
from lachesis.engine.kv_cache import SlotCache
from lachesis.engine.lora import Part, Snapshot
from lachesis.engine.peft_layers import adapted_by_peft

if TYPE_CHECKING:
    from lachesis.engine.model import BaseModel

log = logging.getLogger(__name__)
SAME = 1e-3
"""Nats by which log-probabilities may differ, times the largest logit where that is above 1."""
BFLOAT16 = 10
"""Has three digits; it gets this many times the limit."""
SHORT = 24
"""Tokens that are compared, where no window or chunk is longer than SHORT_WINDOW."""
SHORT_WINDOW = 8
BEYOND = 4
"""Tokens that are compared behind the longest window that cannot be shortened."""
GROWTH = 1.0
"""Length of the random adapter's effect: enough to show where it is left out."""
STEP = 1e-3
"""Nats per token by which the tiny training step should lower the loss."""
TRIES = 3
CONFIGURED_WINDOWS = ("sliding_window", "attention_chunk_size")
"""Windows that masks are made from in each pass, so that a check may shorten them."""
FIXED_WINDOWS = ("window_size", "sliding_window_size", "attention_window_size")
"""Windows that a model builds in once."""
KNOWN_TO_DIFFER = {
    "hrm_text": "its log-probabilities after one training step differ by 0.16 nats from those of "
    "PyTorch and PEFT (it leaves most of its cycles out of the gradient; allowed: 0.001)",
}
"""Families that `make families` found to differ where the checks of a start find nothing."""


def check(base: BaseModel) -> None:
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
        reason = f"a pass over {SHORT} tokens fails with {type(error).__name__}: {error}"
        raise _refusal(base, reason) from error


def check_layers(base: BaseModel) -> None:
    """Adapt the layers that PEFT adapts for the names in an exported adapter, and no others.

    Raises:
        UnsupportedModelError: PEFT refuses the names or adapts none of these layers, or the family
            is known to differ.
    """
    if base.module.config.model_type in KNOWN_TO_DIFFER:
        raise _refusal(base, KNOWN_TO_DIFFER[base.module.config.model_type])
    for _ in range(2):
        try:
            adapted = adapted_by_peft(base.module.config, base.sites.target_modules(base.sites.shapes))
        except Exception as error:
            raise _refusal(base, f"PEFT cannot load its adapters: {error}") from error
        left_out = set(base.sites.shapes) - adapted
        if not left_out:
            break
        log.info("%d layers are not adapted: PEFT cannot load them: %s", len(left_out), sorted(left_out)[:3])
        base.sites.leave_out(left_out)
        if not base.sites.shapes:
            raise _refusal(base, "PEFT loads no adapter of its layers")
    if adapted != set(base.sites.shapes):
        raise _refusal(
            base,
            f"PEFT adapts {len(adapted)} layers where this engine adapts {len(base.sites.shapes)} "
            f"({sorted(adapted ^ set(base.sites.shapes))[:3]} differ)",
        )


def check_sampling(base: BaseModel) -> None:
    """Compare sequences that are extended token by token with one pass of the model over each.

    Two sequences of different lengths are in one batch, the longer one beyond every window and
    chunk, first without adapters and then each with one of its own.

    Raises:
        UnsupportedModelError: The log-probabilities differ, or cannot be had in this way.
    """
    with _short_windows(base):
        count = min(base.context, max(SHORT, _fixed_window(base) + BEYOND))
        rows = [_tokens(base, count, 7), _tokens(base, max(3, count // 3), 5)]
        expected = [_last(base.module(input_ids=row[None]).logits) for row in rows]
        base.choose_head(rows[1])
        _compare_decoded(base, rows, [None, None], expected, "of the base model")
        if base.module.dtype != torch.float32:
            return  # what random adapters add is lost among the errors of bfloat16
        adapters: list[Snapshot | None] = [_random_adapter(base, seed) for seed in (1, 2)]
        expected = []
        for row, adapter in zip(rows, adapters, strict=True):
            base.sites.sample([(None, adapter)])
            expected.append(_last(base.module(input_ids=row[None]).logits))
        _compare_decoded(base, rows, adapters, expected, "with two adapters in one batch")
        base.sites.forget()


def check_training(base: BaseModel) -> None:
    """Take tiny steps along the gradient of an adapter; the loss must change as the slope says.

    A step may cross the border at which a mixture chooses other experts, so there are three tries.

    Raises:
        UnsupportedModelError: There is no gradient, or the loss changes otherwise.
    """
    for seed in range(TRIES):
        slope, fell = _tiny_step(base, seed)
        if STEP / 3 < fell < 3 * STEP:
            return
    if base.module.dtype == torch.float32 or not slope:
        raise _refusal(
            base,
            f"a training step lowers its loss by {fell:.2g} nats where the gradient, of length "
            f"{slope**0.5:.2g}, says {STEP:.2g}",
        )


def _tiny_step(base: BaseModel, seed: int) -> tuple[float, float]:
    """Return the gradient's squared length, and by how much a step along it lowers the loss."""
    adapter = _random_adapter(base, seed)
    weights = [weight.requires_grad_() for pair in adapter.factors.values() for weight in pair]
    tokens = _tokens(base, min(base.context, SHORT), 7)
    base.sites.train(adapter)
    loss = _loss(base, tokens)
    slope = 0.0
    if loss.requires_grad:
        gradients = torch.autograd.grad(loss, weights, allow_unused=True, materialize_grads=True)
        slope = sum(float(gradient.square().sum()) for gradient in gradients)
    losses = [0.0, 0.0]
    if 0 < slope < float("inf"):
        # Half a step to either side: what is curved cancels out.
        for at, share in enumerate((0.5, -1.0)):
            with torch.no_grad():
                for weight, gradient in zip(weights, gradients, strict=True):
                    weight += share * STEP / slope * gradient
                losses[at] = float(_loss(base, tokens))
    base.sites.forget()
    return slope, losses[0] - losses[1]


def _compare_decoded(
    base: BaseModel,
    rows: list[torch.Tensor],
    adapters: list[Snapshot | None],
    expected: list[torch.Tensor],
    which: str,
) -> None:
    try:
        decoded = _decoded(base, rows, adapters)
    except Exception as error:
        raise _refusal(base, f"it cannot be sampled with a cache: {error}") from error
    for name, own, theirs in zip(("long", "short"), decoded, expected, strict=True):
        limit = allowed(base, theirs)
        apart = difference(own.log_softmax(-1), theirs.log_softmax(-1))
        if not apart <= limit:
            raise _refusal(
                base,
                f"log-probabilities {which} differ token by token from those of one pass by "
                f"{apart:.2g} nats (the {name} one of two sequences of {len(rows[0])} and "
                f"{len(rows[1])} tokens; allowed: {limit:.2g})",
            )


def _decoded(base: BaseModel, rows: list[torch.Tensor], adapters: list[Snapshot | None]) -> list[torch.Tensor]:
    """Return the logits of each row's last token; the last two tokens are added one by one."""
    device = base.device
    slots = torch.arange(len(rows), device=device)
    parts: list[Part] = [(slots[at : at + 1], adapter) for at, adapter in enumerate(adapters) if adapter is not None]
    base.sites.sample(parts or [(None, None)])
    lengths = torch.tensor([len(row) - 2 for row in rows], device=device)
    prompts = torch.zeros(len(rows), len(rows[0]) - 2, dtype=torch.long, device=device)
    for at, row in enumerate(rows):
        prompts[at, : len(row) - 2] = row[:-2]
    filled, cache = base.new_cache(), SlotCache()
    base.states(prompts, cache=filled)
    cache.reserve(len(rows), len(rows[0]), filled)
    base.token_bytes = sum(layer.keys[0, :, 0].nbytes + layer.values[0, :, 0].nbytes for layer in filled.layers)
    cache.enter(0, filled, slots)
    for back in (2, 1):
        ids = torch.stack([row[-back] for row in rows])
        width = len(rows[0]) - back + 1
        states = base.decode(ids, lengths + (2 - back), cache, slots, width)
    return list(base.logits(states))


def _random_adapter(base: BaseModel, seed: int) -> Snapshot:
    """Return an adapter of rank 1 on every layer that is adapted, with a visible effect."""
    generator = torch.Generator().manual_seed(seed)
    factors = {}
    for path, (rows, columns) in base.sites.shapes.items():
        a = torch.randn(1, columns, generator=generator) / columns**0.5
        b = torch.randn(rows, 1, generator=generator) / rows**0.5
        factors[path] = (a.to(base.device), b.to(base.device))
    return Snapshot(factors, GROWTH / len(factors) ** 0.5)


def _loss(base: BaseModel, tokens: torch.Tensor) -> torch.Tensor:
    """Mean negative log-probability of the tokens, by the passes that training uses."""
    logprobs = base.logits(base.states(tokens[None, :-1]))[0].log_softmax(-1)
    return -logprobs.gather(1, tokens[1:, None]).mean()


def _tokens(base: BaseModel, count: int, step: int) -> torch.Tensor:
    return (torch.arange(1, count + 1, device=base.device) * step) % base.vocabulary


def _last(logits: torch.Tensor) -> torch.Tensor:
    return logits[0, -1].float()


def allowed(base: BaseModel, logits: torch.Tensor) -> float:
    """Return by how much two ways to these logits may differ."""
    largest = float(logits.abs().max().clamp(min=1.0))
    return SAME * largest * (1 if base.module.dtype == torch.float32 else BFLOAT16)


def difference(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the largest difference of two tensors; those of different shapes are infinitely far."""
    return float((one - other).abs().max()) if one.shape == other.shape else float("inf")


@contextlib.contextmanager
def _short_windows(base: BaseModel) -> Iterator[None]:
    """Shorten the windows that masks are made from: a few tokens then reach beyond them."""
    config = base.module.config.get_text_config()
    long = {
        name: window
        for name in CONFIGURED_WINDOWS
        if isinstance(window := getattr(config, name, None), int) and window > SHORT_WINDOW
    }
    try:
        for name in long:
            setattr(config, name, SHORT_WINDOW)
        base.read_windows()
        yield
    finally:
        for name, window in long.items():
            setattr(config, name, window)
        base.read_windows()


def _fixed_window(base: BaseModel) -> int:
    config = base.module.config.get_text_config()
    windows = [getattr(config, name, None) for name in FIXED_WINDOWS]
    return max([window for window in windows if isinstance(window, int)], default=0)


def _refusal(base: BaseModel, reason: str) -> UnsupportedModelError:
    family: Any = base.module.config.model_type
    return UnsupportedModelError(
        f"the model {base.source} ({family}) cannot be served correctly: {reason}; "
        "allowed: models of a family that agrees in docs/families.md"
    )
