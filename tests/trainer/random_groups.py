"""Random groups of rollouts, and what a batch of them contains."""

from typing import Any

import numpy as np
from hypothesis import strategies as st

from lachesis.trainer.batch.group_to_datums import IGNORE_INDEX, Batch, BatchSettings, Datum

EOS = 3
RECIPE = BatchSettings(max_tokens=1000, eos_id=EOS)
KINDS = st.sampled_from(["mean", "mean_std", "leave_one_out"])
SCORES = st.integers(-40, 40).map(lambda number: number / 4)
"""Sums and differences of these are exact, so that equal stays equal."""
LOGPROBS = st.floats(-8, 0, width=32)


@st.composite
def rollouts(draw: st.DrawFn) -> tuple[list[int], list[bool], list[float]]:
    """Tokens, which of them were sampled, and their log-probabilities."""
    tokens = draw(st.lists(st.integers(0, 6), min_size=1, max_size=9))
    sampled = draw(st.lists(st.booleans(), min_size=len(tokens), max_size=len(tokens)))
    values = draw(st.lists(LOGPROBS, min_size=len(tokens), max_size=len(tokens)))
    return (
        tokens,
        sampled,
        [value if flag else 1.0 for value, flag in zip(values, sampled, strict=True)],
    )


@st.composite
def groups(draw: st.DrawFn) -> dict[str, Any]:
    drawn = [draw(rollouts()) for _ in range(draw(st.sampled_from([2, 4])))]
    return {
        "tokens": [tokens for tokens, _, _ in drawn],
        "masks": [
            [token if flag else IGNORE_INDEX for token, flag in zip(tokens, sampled, strict=True)]
            for tokens, sampled, _ in drawn
        ],
        "inference_logprobs": [values for _, _, values in drawn],
        "scores": [draw(SCORES) for _ in drawn],
    }


BATCHES = st.lists(groups(), min_size=1, max_size=3)


def facts(datum: Datum) -> tuple[bytes, ...]:
    """A datum as something that can be compared and sorted."""
    return tuple(
        np.ascontiguousarray(getattr(datum, name)).tobytes()
        for name in ("tokens", "targets", "logprobs", "advantages", "loss_mask")
    )


def contents(batch: Batch) -> list[tuple[bytes, ...]]:
    return [facts(datum) for datum in batch.datums]


def permuted(group: dict[str, Any], order: list[int]) -> dict[str, Any]:
    return {name: [values[index] for index in order] for name, values in group.items()}
