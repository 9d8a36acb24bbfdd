"""Convert scored groups to training datums; pure functions on numpy arrays.

A group holds the G rollouts of one prompt. Suffixes of names give axes: _P groups, _G rollouts, _T
tokens, _D datums.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from lachesis.base.arrays import Array
from lachesis.base.errors import BatchError, shorten
from lachesis.base.reward_values import is_score
from lachesis.rollout_api.scored_group import (
    MIN_LOGPROB,
    build_keep_mask,
    count_entries,
    find_fault,
    find_sampled_spans,
    get_environment,
    get_rollout_overrides,
)
from lachesis.rollouts.parquet_files import RolloutOutcome
from lachesis.trainer.batch.advantages import (
    AdvantageEstimator,
    compute_advantages,
    compute_distillation_advantages,
    compute_sequence_weights,
)

# Mask value of positions that are not trained on; at trained positions the mask repeats the token.
IGNORE_INDEX = -100
# Exceptions that a group with values of wrong types may cause; BatchError is a ValueError.
MALFORMED_GROUP_ERRORS = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


@dataclass(frozen=True)
class Datum:
    """Hold one training sequence of N positions: position i reads `tokens[i]` and predicts
    `targets[i]`.

    `logprobs` are natural logs at sampling time. They and `advantages` are 0.0 where `loss_mask` is
    false.
    """

    tokens: Array
    targets: Array
    logprobs: Array
    advantages: Array
    loss_mask: Array
    places: Array | None = None
    """Where each target is among the tokens of its rollout, of which some may be left out."""


@dataclass
class Batch:
    """Hold the datums of one step and the statistics of their rollouts."""

    datums: list[Datum] = field(default_factory=list)
    datum_rollouts: list[tuple[int, int]] = field(default_factory=list)
    """The numbers of the group and of the rollout of each datum."""
    training_logprobs_D: list[Array] = field(default_factory=list)
    """Log-probabilities of each datum's targets under the weights before this step's update."""
    scores: list[float] = field(default_factory=list)
    num_groups: int = 0
    zero_signal_groups: int = 0
    num_too_long: int = 0
    num_truncated: int = 0
    """Number of truncated rollouts, if they are dropped."""
    num_distilled: int = 0
    num_invalid: int = 0
    """Number of rollouts that their environment could not score; they are not in `scores`."""
    num_without_logprobs: int = 0
    """Number of rollouts that came without log-probabilities, which were computed later."""
    reward_parts: dict[str, list[float]] = field(default_factory=dict)
    """The parts of the rewards by name."""
    scores_by_environment: dict[str, list[float]] = field(default_factory=dict)
    """The scores by environment, if several feed the run."""
    drop_reasons: dict[int, str] = field(default_factory=dict)
    """Why a group cannot be trained on, by its number in the batch. Such a group is not counted
    anywhere else.
    """
    rollout_outcomes: dict[tuple[int, int], tuple[RolloutOutcome, float]] = field(
        default_factory=dict
    )
    """What became of each valid rollout, and its advantage before weights and penalties, by the
    numbers of its group and of the rollout in it.
    """

    def compute_metrics(self) -> dict[str, float]:
        """Return the metrics of the batch.

        These are reward/*, reward/parts/* if environments name parts, environments/* if there are
        several, advantages/*, logprobs/* of the sampling side, train/percent_correct (the share of
        scores above 0), and counts.
        """
        result = {**self._compute_reward_metrics(), **self._count_rollouts()}
        if self.num_distilled:
            result["distil/rollouts"] = self.num_distilled
        if self.datums:
            result |= summarize_distribution("logprobs", self.collect_trained_values("logprobs"))
            advantages = self.collect_trained_values("advantages")
            result["advantages/mean"] = float(advantages.mean())
            result["advantages/std"] = float(advantages.std())
            if self.num_distilled:
                result["distil/advantage_mean"] = float(advantages.mean())
        return result

    def _compute_reward_metrics(self) -> dict[str, float]:
        """Return mean and spread of the rewards, also by part and environment."""
        result = {"reward/mean": 0.0, "reward/std": 0.0}
        if self.scores:
            result["reward/mean"] = float(np.mean(self.scores))
            result["reward/std"] = float(np.std(self.scores))
            result["train/percent_correct"] = float(np.mean(np.asarray(self.scores) > 0))
        for name, values in self.reward_parts.items():
            result[f"reward/parts/{name}"] = float(np.mean(values))
        for name, scores in self.scores_by_environment.items():
            result[f"environments/{name}/reward_mean"] = float(np.mean(scores))
            result[f"environments/{name}/rollouts"] = len(scores)
        return result

    def _count_rollouts(self) -> dict[str, float]:
        """Return how many rollouts, groups and tokens the batch has, and what became of them."""
        return {
            "batch/rollouts": len(self.scores),
            "batch/groups": self.num_groups,
            "batch/dropped_groups": len(self.drop_reasons),
            "batch/zero_signal_groups": self.zero_signal_groups,
            "batch/zero_signal_share": self.zero_signal_groups / max(1, self.num_groups),
            "batch/too_long": self.num_too_long,
            "batch/invalid": self.num_invalid,
            "batch/cut": self.num_truncated,
            "batch/without_logprobs": self.num_without_logprobs,
            "batch/datums": len(self.datums),
            "batch/trained_tokens": int(sum(datum.loss_mask.sum() for datum in self.datums)),
        }

    def add_scores(
        self, scores_G: Array, overrides_G: Sequence[Mapping[str, Any]], valid_G: Array
    ) -> None:
        """Add the scores of a group."""
        self.scores += scores_G[valid_G].tolist()
        self.num_invalid += int((~valid_G).sum())
        for overrides, valid in zip(overrides_G, valid_G, strict=True):
            parts = overrides.get("parts")
            for name, value in parts.items() if valid and isinstance(parts, Mapping) else ():
                if is_score(value):
                    self.reward_parts.setdefault(str(name)[:80], []).append(float(value))

    def merge(self, group_batch: "Batch") -> None:
        """Add the content of a batch that was made from one group."""
        self.datums += group_batch.datums
        self.datum_rollouts += group_batch.datum_rollouts
        self.scores += group_batch.scores
        for name in (
            "num_groups",
            "zero_signal_groups",
            "num_too_long",
            "num_truncated",
            "num_distilled",
            "num_invalid",
        ):
            setattr(self, name, getattr(self, name) + getattr(group_batch, name))
        self.rollout_outcomes |= group_batch.rollout_outcomes
        for name in ("reward_parts", "scores_by_environment"):
            for key, values in getattr(group_batch, name).items():
                getattr(self, name).setdefault(key, []).extend(values)

    def collect_trained_values(self, name: str) -> Array:
        """Return the values of a datum field on all trained positions."""
        return np.concatenate([getattr(datum, name)[datum.loss_mask] for datum in self.datums])


def summarize_distribution(prefix: str, values: Array, suffix: str = "") -> dict[str, float]:
    """Return mean, std, min and p50 under their metric names."""
    return {
        f"{prefix}/mean{suffix}": float(values.mean()),
        f"{prefix}/std{suffix}": float(values.std()),
        f"{prefix}/min{suffix}": float(values.min()),
        f"{prefix}/p50{suffix}": float(np.median(values)),
    }


@dataclass(frozen=True)
class BatchSettings:
    """Say how rollouts become datums.

    `was_truncated(tokens, logprobs)` returns whether the length limit has cut a sampled span; None
    trains on truncated rollouts like on others.
    """

    max_tokens: int
    eos_id: int | None
    advantage: AdvantageEstimator = "mean"
    loss_aggregation: Literal["token_mean", "sequence_mean"] = "token_mean"
    was_truncated: Callable[[list[int], list[float]], bool] | None = None
    has_kl_penalty: bool = False
    """Whether `add_kl_penalty` follows, so that rollouts without advantage are kept."""


def to_batch(
    groups_P: Sequence[Mapping[str, Any]],
    settings: BatchSettings,
    drop_reasons: Mapping[int, str] | None = None,
) -> Batch:
    """Convert each prompt's G rollouts to at most G datums.

    A rollout that its environment marks as invalid is excluded, and its score is not in the group's
    mean. Groups whose advantages are all zero, rollouts of more than `max_tokens` tokens, and
    truncated rollouts if configured (Yu et al. 2025, arXiv:2503.14476, section 3.4) are dropped but
    counted, and their scores are in the group's mean. A group that cannot be trained on is dropped
    as a whole, with its reason in the batch's `drop_reasons`, like the groups that the caller
    names.

    Raises:
        BatchError: No group is left; the message has the first reason.
    """
    batch = Batch(drop_reasons=dict(drop_reasons or {}))
    for group_index, group in enumerate(groups_P):
        if group_index in batch.drop_reasons:
            continue
        try:
            batch.merge(_convert_group(group_index, group, settings))
        except MALFORMED_GROUP_ERRORS as error:
            if isinstance(error, BatchError):
                error_prefix = ""
            else:
                error_prefix = f"{type(error).__name__}: "
            batch.drop_reasons[group_index] = shorten(f"{error_prefix}{error}", 500)
    if groups_P and len(batch.drop_reasons) == len(groups_P):
        first_index = min(batch.drop_reasons)
        raise BatchError(
            f"none of the {len(groups_P)} groups of a batch can be trained on; group "
            f"{first_index}: {batch.drop_reasons[first_index]}"
        )
    if not settings.has_kl_penalty:
        apply_loss_aggregation(batch, settings)
    return batch


def apply_loss_aggregation(batch: Batch, settings: BatchSettings) -> None:
    """Scale the advantages so that each rollout counts the same, if the settings ask for it."""
    if settings.loss_aggregation == "sequence_mean" and batch.datums:
        for datum, weight in zip(
            batch.datums,
            compute_sequence_weights(
                [int(counted_datum.loss_mask.sum()) for counted_datum in batch.datums]
            ),
            strict=True,
        ):
            datum.advantages[:] *= weight


def _convert_group(group_index: int, group: Mapping[str, Any], settings: BatchSettings) -> Batch:
    """Convert one group; raise one of MALFORMED_GROUP_ERRORS if it cannot be trained on."""
    if fault := find_fault(group):
        raise BatchError(fault)
    num_rollouts = len(group["tokens"])
    group_batch = Batch(num_groups=1)
    overrides_G = get_rollout_overrides(group, num_rollouts)
    valid_G = np.array([not overrides.get("invalid") for overrides in overrides_G])
    scores_G = np.asarray(group["scores"], dtype=np.float64)
    group_batch.add_scores(scores_G, overrides_G, valid_G)
    if (environment := get_environment(group)) and valid_G.any():
        group_batch.scores_by_environment[environment] = scores_G[valid_G].tolist()
    advantages_G = np.zeros(num_rollouts)
    if valid_G.any():
        advantages_G[valid_G] = compute_advantages(scores_G[valid_G], settings.advantage)
    # Equal scores can differ from their mean by rounding, so they are compared with each other.
    has_equal_scores = len(set(scores_G[valid_G].tolist())) < 2
    if has_equal_scores:
        advantages_G[:] = 0.0
    for index in np.flatnonzero(valid_G).tolist():
        group_batch.rollout_outcomes[group_index, index] = ("no signal", float(advantages_G[index]))
    is_advantage_zeroed = (group.get("group_overrides") or {}).get("set_advantage_to_zero")
    is_distilled = bool(count_entries(group.get("distill_token_ids")))
    if is_advantage_zeroed or (has_equal_scores and not is_distilled):
        group_batch.zero_signal_groups = 1
        if is_advantage_zeroed or not settings.has_kl_penalty:
            return group_batch
    for index in np.flatnonzero(valid_G).tolist():
        advantage = float(advantages_G[index])
        outcome = _add_rollout(group_batch, group, overrides_G[index], index, advantage, settings)
        group_batch.rollout_outcomes[group_index, index] = (outcome, advantage)
        if outcome == "trained":
            group_batch.datum_rollouts.append((group_index, index))
    return group_batch


def _add_rollout(
    batch: Batch,
    group: Mapping[str, Any],
    overrides: Mapping[str, Any],
    index: int,
    advantage: float,
    settings: BatchSettings,
) -> RolloutOutcome:
    """Add the datum of a rollout if it has a gradient, and return the outcome of the rollout."""
    rollout_label = f"rollout {index}"
    is_advantage_zeroed = bool(overrides.get("set_advantage_to_zero"))
    tokens_T, loss_mask_T, logprobs_T = _read_rollout(rollout_label, group, index)
    advantages_T = np.full(len(tokens_T), 0.0 if is_advantage_zeroed else advantage)
    if count_entries(group.get("distill_token_ids")):
        advantages_T = compute_distillation_advantages(
            rollout_label, group, index, tokens_T, loss_mask_T, logprobs_T
        )
        batch.num_distilled += 1
    if settings.was_truncated and _was_last_span_truncated(
        tokens_T, loss_mask_T, logprobs_T, settings.was_truncated
    ):
        batch.num_truncated += 1
        return "truncated"
    keep_mask_T = build_keep_mask(tokens_T, settings.eos_id, loss_mask_T)
    tokens_T, loss_mask_T, logprobs_T, advantages_T = (
        array[keep_mask_T] for array in (tokens_T, loss_mask_T, logprobs_T, advantages_T)
    )
    if len(tokens_T) > settings.max_tokens:
        batch.num_too_long += 1
        return "too long"
    places_N = np.flatnonzero(keep_mask_T)[1:]
    datum = _build_datum(tokens_T, loss_mask_T, logprobs_T, advantages_T, places_N)
    # Without an advantage a rollout has no gradient, unless the KL penalty will give it one.
    has_gradient = bool(datum.advantages.any()) or (
        settings.has_kl_penalty and not is_advantage_zeroed and bool(datum.loss_mask.any())
    )
    if has_gradient:
        batch.datums.append(datum)
        return "trained"
    return "no signal"


def _build_datum(
    tokens_T: Array, loss_mask_T: Array, logprobs_T: Array, advantages_T: Array, places_N: Array
) -> Datum:
    """Return the datum of a rollout: each token predicts its successor, so targets shift by 1."""
    loss_mask_N = loss_mask_T[1:]
    return Datum(
        tokens=tokens_T[:-1],
        targets=tokens_T[1:],
        logprobs=np.where(loss_mask_N, logprobs_T[1:], 0.0).astype(np.float32),
        advantages=np.where(loss_mask_N, advantages_T[1:], 0.0).astype(np.float32),
        loss_mask=loss_mask_N,
        places=places_N,
    )


def _read_rollout(
    rollout_label: str, group: Mapping[str, Any], index: int
) -> tuple[Array, Array, Array]:
    """Return the tokens, the loss mask and the sampling log-probabilities of a rollout."""
    logprobs_G = group.get("inference_logprobs")
    if logprobs_G is None or not len(logprobs_G):
        raise BatchError(
            f"{rollout_label}: the environment sent no inference_logprobs, which the loss needs; "
            "it must take them from managed_server nodes (node.logprobs)"
        )
    tokens_T = np.asarray(group["tokens"][index], dtype=np.int64)
    loss_mask_T = np.asarray(group["masks"][index], dtype=np.int64) != IGNORE_INDEX
    logprobs_T = np.asarray(logprobs_G[index], dtype=np.float64)
    if not tokens_T.ndim == loss_mask_T.ndim == logprobs_T.ndim == 1 or (tokens_T < 0).any():
        raise BatchError(
            f"{rollout_label}: tokens, masks and inference_logprobs must be lists of numbers, and "
            "no token id may be negative"
        )
    sampled_logprobs = logprobs_T[1:][loss_mask_T[1:]]  # The first token is not predicted.
    # Atropos writes 1.0 where it has no log-probability.
    unusable_logprobs = sampled_logprobs[
        ~((sampled_logprobs >= MIN_LOGPROB) & (sampled_logprobs <= 0.01))
    ]
    if len(unusable_logprobs):
        raise BatchError(
            f"{rollout_label}: {len(unusable_logprobs)} sampling logprobs of trained tokens are "
            f"not usable: {unusable_logprobs[:8].tolist()}; allowed: {MIN_LOGPROB:g} to 0"
        )
    return tokens_T, loss_mask_T, logprobs_T


def _was_last_span_truncated(
    tokens_T: Array,
    loss_mask_T: Array,
    logprobs_T: Array,
    was_truncated: Callable[[list[int], list[float]], bool],
) -> bool:
    """Return whether the last sampled span of a rollout was cut off."""
    spans = find_sampled_spans(loss_mask_T)
    if not spans:
        return False
    start, end = spans[-1]
    return was_truncated(tokens_T[start:end].tolist(), logprobs_T[start:end].tolist())
