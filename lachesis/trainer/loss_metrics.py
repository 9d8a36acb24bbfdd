"""Compute the metrics of an update and of the rollouts it was made with."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lachesis.base.arrays import Array
from lachesis.config.run_config import RunConfig
from lachesis.inference_server.token_usage import Usage, find_span_staleness
from lachesis.trainer.batch.group_to_datums import IGNORE_INDEX, Batch, summarize_distribution

# Default bounds of the probability ratio in the losses that have some.
RATIO_BOUNDS = {"ppo": (0.8, 1.2), "cispo": (0.0, 4.0), "gspo": (0.8, 1.2)}


def compute_loss_metrics(
    batch: Batch, training_logprobs_D: list[Array], loss_sum: float, config: RunConfig
) -> dict[str, float]:
    """Return the metrics of one step.

    They are computed from the log-probabilities lp of each datum's targets under the trained
    weights, and q of the sampling side:

    train/loss           sum of the loss / trained tokens
    logprobs/diff, gap   mean of q - lp, of |q - lp|
    kl/sampling_train    mean of r - 1 - log r, r = exp(lp - q): KL(sampling || training) in nats
                         per token, the estimate k3, which is never negative (Schulman 2020,
                         joschu.net/blog/kl-approx.html)
    entropy/training     -mean of lp, each token weighted by r: the entropy of the weights in
                         training, on samples of the older ones
    loss/clipped_share   share of tokens whose ratio is outside the bounds of the loss, if it has
                         any
    """
    trained_logprobs_D = [
        logprobs_N[datum.loss_mask]
        for logprobs_N, datum in zip(training_logprobs_D, batch.datums, strict=True)
    ]
    training_logprobs = np.concatenate(trained_logprobs_D)
    log_ratios_D = [
        np.clip(trained - datum.logprobs[datum.loss_mask].astype(np.float64), -20.0, 20.0)
        for trained, datum in zip(trained_logprobs_D, batch.datums, strict=True)
    ]
    log_ratios = np.concatenate(log_ratios_D)
    ratios = np.exp(log_ratios)
    differences = batch.collect_trained_values("logprobs").astype(np.float64) - training_logprobs
    return {
        "train/loss": loss_sum / len(training_logprobs),
        **summarize_distribution("logprobs", training_logprobs, "_training"),
        "logprobs/diff": float(differences.mean()),
        "logprobs/gap": float(np.abs(differences).mean()),
        "kl/sampling_train": float((ratios - 1 - log_ratios).mean()),
        "entropy/training": float(-(ratios * training_logprobs).mean()),
        **_compute_clipped_share(log_ratios_D, config),
    }


def _compute_clipped_share(log_ratios_D: Sequence[Array], config: RunConfig) -> dict[str, float]:
    """Compare each token's ratio, or in GSPO that of its sequence, with the bounds of the loss."""
    loss_fn = config.effective_loss
    if loss_fn not in RATIO_BOUNDS:
        return {}
    if loss_fn == "gspo":
        log_ratios_D = [np.full(len(log_ratios), log_ratios.mean()) for log_ratios in log_ratios_D]
    low, high = RATIO_BOUNDS[loss_fn]
    if config.tinker.clip_low_threshold is not None:
        low = config.tinker.clip_low_threshold
    if config.tinker.clip_high_threshold is not None:
        high = config.tinker.clip_high_threshold
    ratios = np.exp(np.concatenate(log_ratios_D))
    return {"loss/clipped_share": float(((ratios < low) | (ratios > high)).mean())}


def compute_rollout_metrics(
    groups_P: Sequence[Mapping[str, Any]], usage: Usage
) -> dict[str, float]:
    """Return metrics of sampling for a whole batch, including groups that carry no gradient.

    entropy/sampling   -mean of the sampling log-probabilities, in nats per token: the entropy of
                       the policy on its own samples, as E[-log p(x)] with x from p is the entropy
                       of p
    length/mean        sampled tokens per rollout
    staleness/*        updates between the weights that sampled a rollout and those it is trained on

    Every group must be one that `to_batch` has not dropped.
    """
    logprobs: list[Any] = []
    lengths: list[int] = []
    staleness_values: list[int] = []
    for group in groups_P:
        logprobs_G = group.get("inference_logprobs") or ()
        for index, masks_T in enumerate(group["masks"]):
            loss_mask_T = np.asarray(masks_T) != IGNORE_INDEX
            lengths.append(int(loss_mask_T.sum()))
            if len(logprobs_G):
                logprobs_T = np.asarray(logprobs_G[index], np.float64)
                logprobs.append(_select_sampled_logprobs(logprobs_T, loss_mask_T))
                staleness_values += find_span_staleness(
                    np.asarray(group["tokens"][index]), logprobs_T, loss_mask_T, usage
                )
    metrics: dict[str, float] = {}
    if lengths:
        metrics |= {"length/mean": float(np.mean(lengths)), "length/max": float(max(lengths))}
    if sum(map(len, logprobs)):
        metrics["entropy/sampling"] = -float(np.concatenate(logprobs).mean())
    if staleness_values:
        metrics["staleness/mean"] = float(np.mean(staleness_values))
        metrics["staleness/max"] = float(max(staleness_values))
    return metrics


def _select_sampled_logprobs(logprobs_T: Array, loss_mask_T: Array) -> Array:
    """Return the usable log-probabilities of sampled tokens; the first token is not predicted."""
    sampled_logprobs = logprobs_T[1:][loss_mask_T[1:]]
    return sampled_logprobs[np.isfinite(sampled_logprobs) & (sampled_logprobs <= 0.01)]
