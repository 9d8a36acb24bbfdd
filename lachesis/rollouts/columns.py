"""Compute the columns of many rollouts at once: sampled tokens, texts, and versions of weights.

A step of a small model takes a tenth of a second and has more than a hundred rollouts, so a loop
with several NumPy calls per rollout would take a good part of it. Here all tokens of all rollouts
are one array.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lachesis.base.arrays import Array
from lachesis.base.json_text import Json
from lachesis.rollouts.parquet_files import FlatLists
from lachesis.trainer.batch.group_to_datums import IGNORE_INDEX, Batch

# Tokens that came without a log-probability have this value or a lower one; see Atropos.
MISSING_LOGPROB = 1.0
NO_TOKENS = np.zeros(0, np.int32)


@dataclass(frozen=True)
class RolloutTokens:
    """Hold the tokens of N rollouts, T in all, one rollout after the other."""

    tokens_T: Array
    sampled_T: Array
    """Whether the model sampled a token."""
    logprobs_T: Array
    """Log-probabilities as they came; NaN for all tokens of a rollout that came without."""
    offsets: Array
    """Where each rollout begins, and the end of the last one: N + 1 numbers."""
    first_sampled_N: Array
    """Where the first sampled token of a rollout is, or its end if there is none."""
    last_span_N: Array
    """Where the last run of sampled tokens begins, of shape (N, 2) with its end; 0 without one."""


def collect_tokens(rows: Sequence[Json]) -> RolloutTokens:
    """Return the tokens of rows whose `arrays` are tokens, mask, and log-probabilities or None.

    A row without `arrays` has no tokens. An invalid rollout has no mask: its sampled tokens are
    those with a log-probability.
    """
    arrays = [row.get("arrays") or (NO_TOKENS, NO_TOKENS, None) for row in rows]
    lengths = np.array([len(tokens) for tokens, _, _ in arrays], np.int64)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    tokens_T = np.concatenate([tokens for tokens, _, _ in arrays])
    sampled_T = np.concatenate([mask for _, mask, _ in arrays]) != IGNORE_INDEX
    logprobs_T = np.concatenate(
        [
            np.full(len(tokens), np.nan) if logprobs is None else logprobs
            for tokens, _, logprobs in arrays
        ]
    )
    rollout_T = np.repeat(np.arange(len(rows)), lengths)
    has_mask_N = np.bincount(rollout_T[sampled_T], minlength=len(rows)) > 0
    sampled_T |= ~has_mask_N[rollout_T] & (logprobs_T < MISSING_LOGPROB)
    first_sampled_N, last_span_N = _find_spans(sampled_T, rollout_T, offsets)
    return RolloutTokens(tokens_T, sampled_T, logprobs_T, offsets, first_sampled_N, last_span_N)


def _find_spans(sampled_T: Array, rollout_T: Array, offsets: Array) -> tuple[Array, Array]:
    """Return where each rollout's first sampled token is, and its last run of sampled tokens."""
    num_rollouts = len(offsets) - 1
    first_sampled_N, last_span_N = offsets[1:].copy(), np.zeros((num_rollouts, 2), np.int64)
    places = np.flatnonzero(sampled_T)
    # A run begins where the token before is not sampled, or belongs to another rollout.
    follows = np.diff(places, prepend=-2) == 1
    follows &= rollout_T[places] == rollout_T[np.maximum(places - 1, 0)]
    run_starts = places[~follows]
    # Places are in order, so of equal rollouts the last one written stays.
    last_span_N[rollout_T[run_starts], 0] = run_starts
    last_span_N[rollout_T[places], 1] = places + 1
    first_sampled_N[rollout_T[places[::-1]]] = places[::-1]
    return first_sampled_N, last_span_N


def add_texts(
    rows: Sequence[Json], tokens: RolloutTokens, decode: Callable[[list[int]], str]
) -> None:
    """Add the texts before and from the first sampled token to the rows that have tokens.

    The rollouts of a group have one prompt, and many of them one answer: each text is decoded once.
    """
    texts: dict[bytes, str] = {}
    buffer, size = tokens.tokens_T.tobytes(), tokens.tokens_T.itemsize
    starts, ends = tokens.offsets[:-1].tolist(), tokens.offsets[1:].tolist()
    middles = tokens.first_sampled_N.tolist()
    for row, start, middle, end in zip(rows, starts, middles, ends, strict=True):
        if "arrays" not in row:
            continue
        for name, first, last in (("prompt", start, middle), ("answer", middle, end)):
            key = buffer[first * size : last * size]
            text = texts.get(key)
            if text is None:
                text = texts[key] = decode(tokens.tokens_T[first:last].tolist())
            row[name] = text


def add_versions(
    rows: Sequence[Json],
    tokens: RolloutTokens,
    find_version: Callable[[list[int], list[float]], int | None],
) -> None:
    """Add the version of the weights that sampled the last turn, where it is known."""
    for row, (start, end) in zip(rows, tokens.last_span_N.tolist(), strict=True):
        if end > start:
            row["weights_version"] = find_version(
                tokens.tokens_T[start:end].tolist(), tokens.logprobs_T[start:end].tolist()
            )


def make_token_columns(rows: Sequence[Json], tokens: RolloutTokens) -> dict[str, FlatLists]:
    """Return the columns with a value per token."""
    has_tokens_N = np.array(["arrays" in row for row in rows])
    has_logprobs_N = np.array(
        ["arrays" in row and row["arrays"][2] is not None for row in rows], bool
    )
    is_known_T = tokens.sampled_T & (tokens.logprobs_T < MISSING_LOGPROB)
    logprobs_T: Any = np.where(is_known_T, tokens.logprobs_T, np.nan)
    trained_T, has_trained_N = _place_training_logprobs(rows, tokens)
    return {
        "trained_logprobs": FlatLists(trained_T, tokens.offsets, has_trained_N),
        "tokens": FlatLists(tokens.tokens_T, tokens.offsets, has_tokens_N),
        "sampled": FlatLists(tokens.sampled_T, tokens.offsets, has_tokens_N),
        "logprobs": FlatLists(logprobs_T, tokens.offsets, has_logprobs_N),
    }


def list_training_logprobs(batch: Batch) -> dict[tuple[int, int], tuple[Array, Array]]:
    """Return, by the numbers of group and rollout, the places of the trained tokens and their
    log-probabilities under the weights in training.
    """
    return {
        rollout: (datum.places[datum.loss_mask], logprobs_N[datum.loss_mask])
        for rollout, datum, logprobs_N in zip(
            batch.datum_rollouts, batch.datums, batch.training_logprobs_D, strict=False
        )
        if datum.places is not None
    }


def _place_training_logprobs(rows: Sequence[Json], tokens: RolloutTokens) -> tuple[Any, Array]:
    """Return the log-probabilities in training of all tokens, NaN for those that were not trained
    on, and whether a row has any.
    """
    trained_T: Any = np.full(len(tokens.tokens_T), np.nan)
    has_trained_N = np.array([row.get("trained") is not None for row in rows], bool)
    starts = tokens.offsets[:-1][has_trained_N]
    trained = [row["trained"] for row in rows if row.get("trained") is not None]
    if trained:
        places = [place + start for (place, _), start in zip(trained, starts, strict=True)]
        trained_T[np.concatenate(places)] = np.concatenate([values for _, values in trained])
    return trained_T, has_trained_N
