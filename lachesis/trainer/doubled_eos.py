"""Remove duplicated end-of-turn tokens, by one rule for prompts and for training.

Atropos' chat turns append the template's end-of-turn token to a completion that already ends with
it. Without this, a later turn would be sampled from a context that no template produces, and
trained in a different context.
"""

from __future__ import annotations

import numpy as np

from lachesis.base.arrays import Array


def build_keep_mask(tokens_T: Array, eos_id: int | None, loss_mask_T: Array | None = None) -> Array:
    """Return a mask (T,) that is true where a token stays.

    An end-of-turn token directly after another one is dropped, unless the model has sampled it. In
    a prompt, without `loss_mask_T`, no token counts as sampled.
    """
    keep_mask_T = np.ones(len(tokens_T), dtype=bool)
    if eos_id is not None:
        is_eos = tokens_T == eos_id
        keep_mask_T[1:] = ~(is_eos[1:] & is_eos[:-1])
    if loss_mask_T is None:
        return keep_mask_T
    return keep_mask_T | loss_mask_T


def collapse_doubled_eos(tokens: list[int], eos_id: int | None) -> list[int]:
    """Return a prompt without doubled end-of-turn tokens."""
    keep_mask_T = build_keep_mask(np.asarray(tokens), eos_id)
    return [token for token, keep in zip(tokens, keep_mask_T, strict=True) if keep]
