"""From scored groups to training datums; pure functions on numpy arrays.

A group is the G rollouts of one prompt. Suffixes name axes: _P groups, _G rollouts, _T tokens, _D datums.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from lachesis.base.errors import BatchError, shorten
from lachesis.base.numbers import is_score
from lachesis.rollout_api.scored_group import find_fault
from lachesis.trainer.advantages import Kind, centred, kl_penalties, per_sequence
from lachesis.trainer.doubled_eos import find_kept

Array = np.ndarray[Any, Any]
IGNORED = -100
"""A mask entry that is not trained on; on trained positions the mask repeats the token."""
LEAST_LOGPROB = -1000.0
"""Some servers write -9999 where they have no log-probability; the ratio of the loss would overflow."""
BAD_VALUES = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""What a group raises whose values have other types than those of a group. A BatchError is a ValueError."""


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
    dropped: dict[int, str] = field(default_factory=dict)
    """Why a group cannot be trained on, by its number in the batch. Such a group counts nowhere else."""

    def metrics(self) -> dict[str, float]:
        """reward/*, with reward/parts/* where the environment names them, environments/* where there are several, advantages/*,
        logprobs/* of the sampling side, train/percent_correct (the share of scores above 0), and counts."""
        result = {
            "reward/mean": float(np.mean(self.scores)) if self.scores else 0.0,
            "reward/std": float(np.std(self.scores)) if self.scores else 0.0,
            "batch/rollouts": len(self.scores),
            "batch/groups": self.groups,
            "batch/dropped_groups": len(self.dropped),
            "batch/zero_signal_groups": self.zero_signal_groups,
            "batch/zero_signal_share": self.zero_signal_groups / self.groups if self.groups else 0.0,
            "batch/too_long": self.too_long,
            "batch/invalid": self.invalid,
            "batch/cut": self.cut,
            "batch/without_logprobs": self.without_logprobs,
            "batch/datums": len(self.datums),
            "batch/trained_tokens": int(sum(datum.trained.sum() for datum in self.datums)),
        }
        if self.scores:
            result["train/percent_correct"] = float(np.mean(np.asarray(self.scores) > 0))
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

    def add(self, group: Batch) -> None:
        """Take in what was made of one group."""
        self.datums += group.datums
        self.scores += group.scores
        for name in ("groups", "zero_signal_groups", "too_long", "cut", "distilled", "invalid"):
            setattr(self, name, getattr(self, name) + getattr(group, name))
        for name in ("parts", "environments"):
            for key, values in getattr(group, name).items():
                getattr(self, name).setdefault(key, []).extend(values)

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
    penalised: bool = False
    """Whether `add_kl_penalty` follows, so that rollouts whose score teaches nothing are kept for it."""


def to_batch(
    groups_P: Sequence[Mapping[str, Any]],
    recipe: Recipe,
    dropped: Mapping[int, str] | None = None,
) -> Batch:
    """Turn each prompt's G rollouts into at most G datums.

    A rollout that its environment marks as invalid takes no part: its score is not in the group's mean. A group whose
    advantages are all zero teaches nothing and is left out; a rollout of more than `max_tokens` tokens is left
    out, and one that was cut where the recipe says so (Yu et al. 2025, arXiv:2503.14476, section 3.4: its score says nothing
    of what it would have become); all are counted, and count in the group's mean.

    A group that cannot be trained on is left out as a whole and stands with its reason in the batch's `dropped`, as do those
    that the caller names in `dropped`. Raises BatchError with the first reason when no group is left.
    """
    batch = Batch(dropped=dict(dropped or {}))
    for number, group in enumerate(groups_P):
        if number in batch.dropped:
            continue
        try:
            batch.add(_to_datums(group, recipe))
        except BAD_VALUES as error:
            kind = "" if isinstance(error, BatchError) else f"{type(error).__name__}: "
            batch.dropped[number] = shorten(f"{kind}{error}", 500)
    if groups_P and len(batch.dropped) == len(groups_P):
        first = min(batch.dropped)
        raise BatchError(
            f"none of the {len(groups_P)} groups of a batch can be trained on; group {first}: {batch.dropped[first]}"
        )
    if not recipe.penalised:
        _weigh(batch, recipe)
    return batch


def add_kl_penalty(batch: Batch, base_D: Sequence[Array], coefficient: float, recipe: Recipe) -> float:
    """Add the penalty on the distance to the base model to the advantages of all trained tokens, then weigh the rollouts.

    `base_D` holds the base model's log-probabilities of each datum's trained tokens. Returns the mean distance, which is the
    estimate of KL(policy || base) in nats per token. Rollouts without any advantage after that are left out.
    """
    sampling_D = [datum.logprobs[datum.trained].astype(np.float64) for datum in batch.datums]
    penalties_D, mean = kl_penalties(sampling_D, base_D, coefficient)
    for datum, penalty in zip(batch.datums, penalties_D, strict=True):
        datum.advantages[datum.trained] += penalty.astype(np.float32)
    batch.datums = [datum for datum in batch.datums if datum.advantages.any()]
    _weigh(batch, recipe)
    return mean


def _weigh(batch: Batch, recipe: Recipe) -> None:
    if recipe.weight_by == "sequence" and batch.datums:
        for datum, factor in zip(batch.datums, per_sequence([int(one.trained.sum()) for one in batch.datums]), strict=True):
            datum.advantages[:] *= factor


def _to_datums(group: Mapping[str, Any], recipe: Recipe) -> Batch:
    """Return what is made of one group. Raises one of BAD_VALUES for a group that cannot be trained on."""
    if fault := find_fault(group):
        raise BatchError(fault)
    rollouts = len(group["tokens"])
    part = Batch(groups=1)
    marks_G = _marks(group, rollouts)
    valid_G = np.array([not mark.get("invalid") for mark in marks_G])
    scores_G = np.asarray(group["scores"], dtype=np.float64)
    part.count(scores_G, marks_G, valid_G)
    if (name := environment_of(group)) and valid_G.any():
        part.environments[name] = scores_G[valid_G].tolist()
    advantages_G = np.zeros(rollouts)
    if valid_G.any():
        advantages_G[valid_G] = centred(scores_G[valid_G], recipe.advantage)
    equal = len(set(scores_G[valid_G].tolist())) < 2  # their mean can differ from them by rounding
    if equal:
        advantages_G[:] = 0.0
    silent = (group.get("group_overrides") or {}).get("set_advantage_to_zero")
    if silent or (equal and not _count(group.get("distill_token_ids"))):
        part.zero_signal_groups = 1
        if silent or not recipe.penalised:
            return part
    for index in np.flatnonzero(valid_G).tolist():
        _add_rollout(part, group, marks_G[index], index, float(advantages_G[index]), recipe)
    return part


def environment_of(group: Mapping[str, Any]) -> str | None:
    """Which of several environments gave the group."""
    name = (group.get("group_overrides") or {}).get("environment")
    return name if isinstance(name, str) else None


def _marks(group: Mapping[str, Any], rollouts: int) -> list[Mapping[str, Any]]:
    """What the environment says of each rollout beside its score."""
    overrides = [one if isinstance(one, Mapping) else {} for one in group.get("overrides") or ()]
    return [*overrides, *({} for _ in range(rollouts))][:rollouts]


def _count(values: Any) -> int:
    """Return the number of entries of a list or array, and 0 for null."""
    return 0 if values is None else len(values)


def _add_rollout(
    batch: Batch, group: Mapping[str, Any], mark: Mapping[str, Any], index: int, advantage: float, recipe: Recipe
) -> None:
    where = f"rollout {index}"
    silent = bool(mark.get("set_advantage_to_zero"))
    tokens_T, trained_T, logprobs_T = _rollout(where, group, index)
    advantages_T = np.full(len(tokens_T), 0.0 if silent else advantage)
    if _count(group.get("distill_token_ids")):
        advantages_T = _teacher_advantages(where, group, index, tokens_T, trained_T, logprobs_T)
        batch.distilled += 1
    if recipe.was_cut and _last_piece_was_cut(tokens_T, trained_T, logprobs_T, recipe.was_cut):
        batch.cut += 1
        return
    keep_T = find_kept(tokens_T, recipe.eos_id, trained_T)
    tokens_T, trained_T, logprobs_T, advantages_T = (array[keep_T] for array in (tokens_T, trained_T, logprobs_T, advantages_T))
    if len(tokens_T) > recipe.max_tokens:
        batch.too_long += 1
        return
    trained_N = trained_T[1:]
    teaches = bool(advantages_T[1:][trained_N].any())
    if not teaches and (silent or not recipe.penalised or not trained_N.any()):
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
    if logprobs_G is None or not len(logprobs_G):
        raise BatchError(
            f"{where}: the environment sent no inference_logprobs, which the loss needs; it must take them from "
            "managed_server nodes (node.logprobs)"
        )
    tokens_T = np.asarray(group["tokens"][index], dtype=np.int64)
    trained_T = np.asarray(group["masks"][index], dtype=np.int64) != IGNORED
    logprobs_T = np.asarray(logprobs_G[index], dtype=np.float64)
    if not tokens_T.ndim == trained_T.ndim == logprobs_T.ndim == 1 or (tokens_T < 0).any():
        raise BatchError(f"{where}: tokens, masks and inference_logprobs are lists of numbers, and no token id is negative")
    sampled = logprobs_T[1:][trained_T[1:]]  # nothing predicts the first token
    wrong = sampled[~((sampled >= LEAST_LOGPROB) & (sampled <= 0.01))]  # Atropos fills in 1.0 where it has none
    if len(wrong):
        raise BatchError(
            f"{where}: {len(wrong)} sampling logprobs of trained tokens are not usable: {wrong[:8].tolist()}; "
            f"none may be above 0 or below {LEAST_LOGPROB:g}"
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
    advantages_T = np.where(trained_T, teacher[:, 0] - logprobs_T, 0.0)
    if not (np.abs(advantages_T[1:]) < -LEAST_LOGPROB).all():
        raise BatchError(f"{where}: distill_logprobs of trained tokens are not finite, or below {LEAST_LOGPROB:g}")
    return advantages_T
