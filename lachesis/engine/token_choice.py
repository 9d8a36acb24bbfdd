"""Choose next tokens, for many sequences at once, by inverting the cumulative distribution at numbers drawn in advance: a
seeded sample does not depend on what else is in the batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch

ALMOST_ONE = 1 - 2**-48
SMALL_VOCABULARY = 1024


@dataclass(frozen=True)
class Settings:
    """Per row; None where no row needs it. `temperature` (R, 1) is 1 where `greedy` (R, 1) is true. `cut` are the rows that
    leave tokens out, with their `top_p` and `top_k` (C, 1); `top_k` < 1 is no limit."""

    temperature: torch.Tensor | None = None
    greedy: torch.Tensor | None = None
    cut: torch.Tensor | None = None
    top_p: torch.Tensor | None = None
    top_k: torch.Tensor | None = None

    @classmethod
    def of(cls, temperature: torch.Tensor, top_p: torch.Tensor, top_k: torch.Tensor) -> Settings:
        """From the numbers of each row, (R,)."""
        zero = temperature == 0
        cut = torch.nonzero((top_p < 1) | (top_k > 0))[:, 0]
        return cls(
            temperature=torch.where(zero, 1.0, temperature)[:, None] if bool((temperature != 1).any()) else None,
            greedy=zero[:, None] if bool(zero.any()) else None,
            cut=cut if len(cut) else None,
            top_p=top_p[cut, None] if len(cut) else None,
            top_k=top_k[cut, None] if len(cut) else None,
        )


def choose(logits: torch.Tensor, uniforms: torch.Tensor, settings: Settings) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens (R,) and their log-probabilities (R,), from logits (R, V) and numbers in [0, 1) (R,). The log-probability is that
    under the temperature-scaled distribution before top-p and top-k cut it; a greedy row's is unscaled."""
    if settings.temperature is not None:
        logits = logits / settings.temperature
    peak = logits.amax(-1, keepdim=True)
    weights = (logits - peak).exp_()
    total = weights.sum(-1, keepdim=True)
    if settings.cut is not None:
        rows = settings.cut
        cut = weights.index_copy(0, rows, _cut(weights[rows], settings))
        tokens = _draw(cut, uniforms)
    else:
        tokens = _draw(weights, uniforms)
    if settings.greedy is not None:
        tokens = torch.where(settings.greedy, logits.argmax(-1, keepdim=True), tokens)
    logprobs = logits.gather(1, tokens) - peak - total.log()
    return tokens[:, 0], logprobs[:, 0]


def _draw(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Indices (R, 1), with probabilities in proportion to weights (R, V). A large vocabulary is searched in blocks, so that it
    is gone through once."""
    rows, vocabulary = weights.shape
    if vocabulary <= SMALL_VOCABULARY:
        return _search(weights, uniforms[:, None])[0]
    size = 128
    if vocabulary % size:
        weights = torch.nn.functional.pad(weights, (0, size - vocabulary % size))
    blocks = weights.view(rows, -1, size)
    block, rest = _search(blocks.sum(-1), uniforms[:, None])
    chosen = blocks[torch.arange(rows, device=weights.device), block[:, 0]]
    within, _ = _search(chosen, rest)
    return block * size + within


def _search(weights: torch.Tensor, shares: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Where a share (R, 1) of the sum of weights (R, N) falls, and which share of that entry is below it, both (R, 1). Never
    an entry without weight."""
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    target = shares.double() * cumulative[:, -1:]
    target = torch.minimum(target, cumulative[:, -1:] * ALMOST_ONE)
    found = torch.searchsorted(cumulative, target, right=True).clamp(max=weights.shape[-1] - 1)
    own = weights.gather(-1, found).double()
    rest = (target - (cumulative.gather(-1, found) - own)) / own.clamp(min=1e-300)
    return found, rest.clamp(0.0, ALMOST_ONE)


def _cut(weights: torch.Tensor, settings: Settings) -> torch.Tensor:
    """Zero what top-k and top-p leave out.

    Top-k comes first. A token then stays when the share of those more likely, among the tokens
    that top-k has left, is below top_p.
    """
    assert settings.top_p is not None
    assert settings.top_k is not None
    ordered, index = weights.sort(-1, descending=True)
    rank = torch.arange(weights.shape[-1], device=weights.device)
    ordered = ordered * ((settings.top_k < 1) | (rank < settings.top_k))
    share = ordered.double() / ordered.sum(-1, keepdim=True, dtype=torch.float64)
    before = share.cumsum(-1) - share
    keep = before < settings.top_p
    keep[:, 0] = True
    return torch.zeros_like(weights).scatter(-1, index, ordered * keep)
