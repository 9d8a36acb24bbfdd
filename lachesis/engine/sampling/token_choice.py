"""Choose the next tokens of many sequences by inverting the cumulative distribution.

The random numbers are drawn in advance, so a seeded sample does not depend on the rest of the
batch.
"""

from dataclasses import dataclass

import torch

ALMOST_ONE = 1 - 2**-48
SMALL_VOCABULARY = 1024


@dataclass(frozen=True)
class TokenChoiceSettings:
    """Hold the sampling settings of each row, with shape [rows]; None if no row needs the setting.

    `temperature` (R, 1) is 1 where `greedy` (R, 1) is true. `filtered_rows` are the rows that
    exclude tokens, with their `top_p` and `top_k` (C, 1); `top_k` < 1 means no limit.
    """

    temperature: torch.Tensor | None = None
    greedy: torch.Tensor | None = None
    filtered_rows: torch.Tensor | None = None
    top_p: torch.Tensor | None = None
    top_k: torch.Tensor | None = None

    @classmethod
    def from_rows(
        cls, temperature: torch.Tensor, top_p: torch.Tensor, top_k: torch.Tensor
    ) -> "TokenChoiceSettings":
        """Create the settings from the values of each row, (R,)."""
        is_greedy = temperature == 0
        filtered_rows = torch.nonzero((top_p < 1) | (top_k > 0))[:, 0]
        return cls(
            temperature=torch.where(is_greedy, 1.0, temperature)[:, None]
            if bool((temperature != 1).any())
            else None,
            greedy=is_greedy[:, None] if bool(is_greedy.any()) else None,
            filtered_rows=filtered_rows if len(filtered_rows) else None,
            top_p=top_p[filtered_rows, None] if len(filtered_rows) else None,
            top_k=top_k[filtered_rows, None] if len(filtered_rows) else None,
        )


def choose_tokens(
    logits: torch.Tensor, uniforms: torch.Tensor, settings: TokenChoiceSettings
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens (R,) and log-probabilities (R,) from logits (R, V) and numbers in [0, 1) (R,).

    The log-probability is that under the temperature-scaled distribution before top-p and top-k are
    applied; that of a greedy row is unscaled.
    """
    if settings.temperature is not None:
        logits = logits / settings.temperature
    peak = logits.amax(-1, keepdim=True)
    weights = (logits - peak).exp_()
    total = weights.sum(-1, keepdim=True)
    if settings.filtered_rows is not None:
        rows = settings.filtered_rows
        filtered = weights.index_copy(0, rows, _filter_top_k_top_p(weights[rows], settings))
        tokens = _draw_indices(filtered, uniforms)
    else:
        tokens = _draw_indices(weights, uniforms)
    if settings.greedy is not None:
        tokens = torch.where(settings.greedy, logits.argmax(-1, keepdim=True), tokens)
    logprobs = logits.gather(1, tokens) - peak - total.log()
    return tokens[:, 0], logprobs[:, 0]


def _draw_indices(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Return indices (R, 1), drawn with probabilities proportional to weights (R, V).

    A large vocabulary is searched in blocks, which needs one pass over it.
    """
    rows, vocab_size = weights.shape
    if vocab_size <= SMALL_VOCABULARY:
        return _invert_cumulative(weights, uniforms[:, None])[0]
    block_size = 128
    if vocab_size % block_size:
        weights = torch.nn.functional.pad(weights, (0, block_size - vocab_size % block_size))
    blocks = weights.view(rows, -1, block_size)
    block_index, remainder = _invert_cumulative(blocks.sum(-1), uniforms[:, None])
    chosen_block = blocks[torch.arange(rows, device=weights.device), block_index[:, 0]]
    index_in_block, _ = _invert_cumulative(chosen_block, remainder)
    return block_index * block_size + index_in_block


def _invert_cumulative(
    weights: torch.Tensor, quantiles: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Find where a share (R, 1) of the sum of weights (R, N) falls.

    Returns:
        The index of the entry, which always has a weight, and the share of the entry below that
            point, both (R, 1).
    """
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    target = quantiles.double() * cumulative[:, -1:]
    target = torch.minimum(target, cumulative[:, -1:] * ALMOST_ONE)
    index = torch.searchsorted(cumulative, target, right=True).clamp(max=weights.shape[-1] - 1)
    entry_weight = weights.gather(-1, index).double()
    remainder = (target - (cumulative.gather(-1, index) - entry_weight)) / entry_weight.clamp(
        min=1e-300
    )
    return index, remainder.clamp(0.0, ALMOST_ONE)


def _filter_top_k_top_p(weights: torch.Tensor, settings: TokenChoiceSettings) -> torch.Tensor:
    """Set the weights of tokens outside top-k and top-p to zero.

    Top-k is applied first. A token then stays if the share of more likely tokens, among those that
    top-k has kept, is below top_p.
    """
    assert settings.top_p is not None
    assert settings.top_k is not None
    ordered, index = weights.sort(-1, descending=True)
    rank = torch.arange(weights.shape[-1], device=weights.device)
    ordered = ordered * ((settings.top_k < 1) | (rank < settings.top_k))
    probability = ordered.double() / ordered.sum(-1, keepdim=True, dtype=torch.float64)
    mass_before = probability.cumsum(-1) - probability
    keep = mass_before < settings.top_p
    keep[:, 0] = True
    return torch.zeros_like(weights).scatter(-1, index, ordered * keep)
