"""From scored groups to training datums; pure functions on numpy arrays.

A group is the G rollouts of one prompt. Suffixes name axes: _P groups, _G rollouts, _T tokens, _D datums.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from lachesis.errors import BatchError
from lachesis.tally import is_score
from lachesis.trainer.advantages import Kind, centred, per_sequence

Array = np.ndarray[Any, Any]
IGNORED = -100
"""A mask entry that is not trained on; on trained positions the mask repeats the token."""


@dataclass(frozen=True)
class Datum:
    """One training sequence of N positions: position i reads `tokens[i]` and predicts `targets[i]`.

    `logprobs` are natural logs at sampling time, 0.0 where `trained` is false; so are `advantages`.
    """

    tokens: Array
    targets: Array
    logprobs: Array
    advantages: Array
    trained: Array


@dataclass
class Batch:
    """The datums of one step and what is known about the rollouts they came from."""

    datums: list[Datum] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    groups: int = 0
    zero_signal_groups: int = 0
    too_long: int = 0
    cut: int = 0
    """Rollouts that the length limit had cut, where they are left out."""
    distilled: int = 0
    invalid: int = 0
    """Rollouts that their environment could not score; they are not in `scores`."""
    without_logprobs: int = 0
    """Rollouts that came without log-probabilities, for which the model was asked."""
    parts: dict[str, list[float]] = field(default_factory=dict)
    """The rewards that the scores are the sums of, by name."""
    environments: dict[str, list[float]] = field(default_factory=dict)
    """The scores by environment, where several feed the run."""

    def metrics(self) -> dict[str, float]:
        """reward/*, with reward/parts/* where the environment names them, environments/* where there are several, advantages/*,
        logprobs/* of the sampling side, and counts."""
        result = {
            "reward/mean": float(np.mean(self.scores)) if self.scores else 0.0,
            "reward/std": float(np.std(self.scores)) if self.scores else 0.0,
            "batch/rollouts": len(self.scores),
            "batch/groups": self.groups,
            "batch/zero_signal_groups": self.zero_signal_groups,
            "batch/zero_signal_share": self.zero_signal_groups / self.groups if self.groups else 0.0,
            "batch/too_long": self.too_long,
            "batch/invalid": self.invalid,
            "batch/cut": self.cut,
            "batch/without_logprobs": self.without_logprobs,
            "batch/datums": len(self.datums),
            "batch/trained_tokens": int(sum(datum.trained.sum() for datum in self.datums)),
        }
        result |= {f"reward/parts/{name}": float(np.mean(values)) for name, values in self.parts.items()}
        for name, scores in self.environments.items():
            result |= {f"environments/{name}/reward_mean": float(np.mean(scores)), f"environments/{name}/rollouts": len(scores)}
        if self.distilled:
            result["distil/rollouts"] = self.distilled
        if self.datums:
            result |= spread("logprobs", self.trained_values("logprobs"))
            advantages = self.trained_values("advantages")
            result |= {"advantages/mean": float(advantages.mean()), "advantages/std": float(advantages.std())}
            if self.distilled:
                result["distil/advantage_mean"] = float(advantages.mean())
        return result

    def count(self, scores_G: Array, marks_G: Sequence[Mapping[str, Any]], valid_G: Array) -> None:
        """Take in the scores of a group."""
        self.scores += scores_G[valid_G].tolist()
        self.invalid += int((~valid_G).sum())
        for mark, valid in zip(marks_G, valid_G, strict=True):
            parts = mark.get("parts")
            for name, value in parts.items() if valid and isinstance(parts, Mapping) else ():
                if is_score(value):
                    self.parts.setdefault(str(name)[:80], []).append(float(value))

    def trained_values(self, name: str) -> Array:
        """The values of a datum's field on all trained positions."""
        return np.concatenate([getattr(datum, name)[datum.trained] for datum in self.datums])


def spread(prefix: str, values: Array, suffix: str = "") -> dict[str, float]:
    """mean, std, min and p50 under the names of the contract."""
    return {
        f"{prefix}/mean{suffix}": float(values.mean()),
        f"{prefix}/std{suffix}": float(values.std()),
        f"{prefix}/min{suffix}": float(values.min()),
        f"{prefix}/p50{suffix}": float(np.median(values)),
    }


@dataclass(frozen=True)
class Recipe:
    """How rollouts become datums. `was_cut(tokens, logprobs)` tells of a sampled piece whether the length limit cut it; null
    trains on such rollouts like on others."""

    max_tokens: int
    eos_id: int | None
    advantage: Kind = "mean"
    weight_by: Literal["token", "sequence"] = "token"
    was_cut: Callable[[list[int], list[float]], bool] | None = None


def to_batch(groups_P: Sequence[Mapping[str, Any]], recipe: Recipe) -> Batch:
    """Turn each prompt's G rollouts into at most G datums.

    A rollout that its environment marks as invalid takes no part: its score is not in the group's mean. A group whose
    advantages are all zero teaches nothing and is left out; a rollout of more than `max_tokens` tokens is left
    out, and one that was cut where the recipe says so (Yu et al. 2025, arXiv:2503.14476, section 3.4: its score says nothing
    of what it would have become); all are counted, and count in the group's mean. Raises BatchError, which names the group,
    for data that cannot be trained on.
    """
    batch = Batch()
    for number, group in enumerate(groups_P):
        tokens_G = group["tokens"]
        if not tokens_G:
            continue
        batch.groups += 1
        marks_G = _marks(group, len(tokens_G))
        valid_G = np.array([not mark.get("invalid") for mark in marks_G])
        scores_G = _scores(number, group, len(tokens_G))
        batch.count(scores_G, marks_G, valid_G)
        if (name := environment_of(group)) and valid_G.any():
            batch.environments.setdefault(name, []).extend(scores_G[valid_G].tolist())
        advantages_G = np.zeros(len(tokens_G))
        if valid_G.any():
            advantages_G[valid_G] = centred(scores_G[valid_G], recipe.advantage)
        equal = len(set(scores_G[valid_G].tolist())) < 2  # their mean can differ from them by rounding
        silent = (group.get("group_overrides") or {}).get("set_advantage_to_zero")
        if silent or (equal and not group.get("distill_token_ids")):
            batch.zero_signal_groups += 1
            continue
        for index in np.flatnonzero(valid_G).tolist():
            _add_rollout(batch, group, number, index, float(advantages_G[index]), recipe)
    if recipe.weight_by == "sequence" and batch.datums:
        for datum, factor in zip(batch.datums, per_sequence([int(one.trained.sum()) for one in batch.datums]), strict=True):
            datum.advantages[:] *= factor
    return batch


def environment_of(group: Mapping[str, Any]) -> str | None:
    """Which of several environments gave the group."""
    name = (group.get("group_overrides") or {}).get("environment")
    return name if isinstance(name, str) else None


def _marks(group: Mapping[str, Any], rollouts: int) -> list[Mapping[str, Any]]:
    """What the environment says of each rollout beside its score."""
    overrides = [one if isinstance(one, Mapping) else {} for one in group.get("overrides") or ()]
    return [*overrides, *({} for _ in range(rollouts))][:rollouts]


def _scores(number: int, group: Mapping[str, Any], rollouts: int) -> Array:
    scores_G = np.asarray(group["scores"], dtype=np.float64)
    if scores_G.shape != (rollouts,):
        raise BatchError(f"group {number} has {rollouts} rollouts but scores of shape {scores_G.shape}")
    if not np.isfinite(scores_G).all():
        raise BatchError(
            f"group {number} has scores {scores_G.tolist()}; every score must be a finite number "
            "(see the score function of the environment)"
        )
    return scores_G


def _add_rollout(batch: Batch, group: Mapping[str, Any], number: int, index: int, advantage: float, recipe: Recipe) -> None:
    where = f"group {number}, rollout {index}"
    tokens_T, trained_T, logprobs_T = _rollout(where, group, index)
    advantages_T = np.full(len(tokens_T), advantage)
    if _marks(group, index + 1)[index].get("set_advantage_to_zero"):
        advantages_T[:] = 0.0
    if group.get("distill_token_ids") and group.get("distill_logprobs"):
        advantages_T = _teacher_advantages(where, group, index, tokens_T, trained_T, logprobs_T)
        batch.distilled += 1
    if recipe.was_cut and _last_piece_was_cut(tokens_T, trained_T, logprobs_T, recipe.was_cut):
        batch.cut += 1
        return
    keep_T = _without_doubled_eos(tokens_T, trained_T, recipe.eos_id)
    tokens_T, trained_T, logprobs_T, advantages_T = (array[keep_T] for array in (tokens_T, trained_T, logprobs_T, advantages_T))
    if len(tokens_T) > recipe.max_tokens:
        batch.too_long += 1
        return
    trained_N = trained_T[1:]
    if not (advantages_T[1:][trained_N]).any():
        return
    batch.datums.append(
        Datum(
            tokens=tokens_T[:-1],
            targets=tokens_T[1:],
            logprobs=np.where(trained_N, logprobs_T[1:], 0.0).astype(np.float32),
            advantages=np.where(trained_N, advantages_T[1:], 0.0).astype(np.float32),
            trained=trained_N,
        )
    )


def _rollout(where: str, group: Mapping[str, Any], index: int) -> tuple[Array, Array, Array]:
    """Tokens, which of them are trained on, and their sampling logprobs; the mask decides, not a sentinel logprob."""
    logprobs_G = group.get("inference_logprobs")
    if not logprobs_G:
        raise BatchError(
            f"{where}: the environment sent no inference_logprobs, which the loss needs; it must take them from "
            "managed_server nodes (node.logprobs)"
        )
    tokens_T = np.asarray(group["tokens"][index], dtype=np.int64)
    masks_T = np.asarray(group["masks"][index], dtype=np.int64)
    logprobs_T = np.asarray(logprobs_G[index], dtype=np.float64)
    if not len(tokens_T) == len(masks_T) == len(logprobs_T):
        raise BatchError(
            f"{where}: {len(tokens_T)} tokens, {len(masks_T)} masks and {len(logprobs_T)} logprobs; "
            "the three must have one length"
        )
    trained_T = masks_T != IGNORED
    sampled = logprobs_T[trained_T]
    if not np.isfinite(sampled).all() or (sampled > 0.01).any():  # Atropos fills in 1.0 where it has none
        raise BatchError(
            f"{where}: the sampling logprobs of trained tokens are {sampled.tolist()}; none may be above 0 or infinite"
        )
    return tokens_T, trained_T, logprobs_T


def pieces(trained_T: Array) -> list[tuple[int, int]]:
    """Where each sampled piece of a rollout begins and ends."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], trained_T.astype(int), [0]])))
    return [(int(start), int(end)) for start, end in edges.reshape(-1, 2)]


def _last_piece_was_cut(
    tokens_T: Array, trained_T: Array, logprobs_T: Array, was_cut: Callable[[list[int], list[float]], bool]
) -> bool:
    found = pieces(trained_T)
    if not found:
        return False
    start, end = found[-1]
    return was_cut(tokens_T[start:end].tolist(), logprobs_T[start:end].tolist())


def _without_doubled_eos(tokens_T: Array, trained_T: Array, eos_id: int | None) -> Array:
    """Atropos' chat turns append the template's end-of-turn token to a completion that already ends with it; the second,
    untrained one is dropped. True where a position stays."""
    keep_T = np.ones(len(tokens_T), dtype=bool)
    if eos_id is not None:
        is_eos = tokens_T == eos_id
        keep_T[1:] = ~(is_eos[1:] & is_eos[:-1] & trained_T[:-1] & ~trained_T[1:])
    return keep_T


def _teacher_advantages(
    where: str, group: Mapping[str, Any], index: int, tokens_T: Array, trained_T: Array, logprobs_T: Array
) -> Array:
    """On-policy distillation: teacher logprob - student logprob of the sampled token.

    `distill_logprobs` has the shape (rollout, token, K), aligned with the tokens; K must be 1 and hold the sampled token.
    """
    ids = np.asarray(group["distill_token_ids"][index])
    teacher = np.asarray(group["distill_logprobs"][index], dtype=np.float64)
    if ids.ndim != 2 or ids.shape != teacher.shape or ids.shape[1] != 1 or len(ids) != len(tokens_T):
        raise BatchError(
            f"{where}: distill_token_ids has shape {ids.shape}, distill_logprobs {teacher.shape}; "
            f"only ({len(tokens_T)}, 1) can be trained through the Tinker API (K = 1, one entry per token)"
        )
    if (ids[trained_T, 0] != tokens_T[trained_T]).any():
        raise BatchError(f"{where}: distill_token_ids names other tokens than those that were sampled")
    return np.where(trained_T, teacher[:, 0] - logprobs_T, 0.0)


def collapse_doubled_eos(tokens: list[int], eos_id: int | None) -> list[int]:
    """The same repair for a prompt: without it a later turn is sampled from a context that no template would build."""
    if eos_id is None or len(tokens) < 2:
        return tokens
    array = np.asarray(tokens)
    keep = np.ones(len(array), dtype=bool)
    keep[1:] = ~((array[1:] == eos_id) & (array[:-1] == eos_id))
    return [int(token) for token in array[keep]]
