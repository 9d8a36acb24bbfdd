"""Losses of the Tinker protocol, token-wise and summed; pure functions of tensors.

Notation: position i of a sequence predicts target i; lp is the log-probability (natural log) of the
target under the weights being trained, q the one at sampling time, A the advantage, r = exp(lp -
q). Normalisation is the client's job. No input masks tokens: a prompt token has advantage (or
weight) 0.

    cross_entropy         -sum(w lp)
    importance_sampling   -sum(r A)
    ppo                   -sum(min(r A, clip(r, low, high) A))          Schulman et al. 2017, arXiv:1707.06347, eq. 7
    cispo                 -sum(stop_gradient(clip(r, low, high)) lp A)  MiniMax-M1, arXiv:2506.13585, eq. 4
    gspo                  ppo with one ratio s per sequence             Zheng et al. 2025, arXiv:2507.18071, eq. 5, 7 and 13
                          s = exp(mean of lp - q over the masked tokens); its token form, so that each token keeps its advantage
    dro                   -sum(lp A - beta / 2 (lp - q)^2)              Richemond et al. 2024, arXiv:2405.19107, eq. 4
                          with the advantage given by the client in place of reward - value
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from lachesis.base.errors import EngineRequestError

Inputs = Mapping[str, torch.Tensor]
Config = Mapping[str, float]
Formula = Callable[[torch.Tensor, Inputs, Config], torch.Tensor]


@dataclass(frozen=True)
class Loss:
    """A formula over the tokens of some sequences, (N,) to (N,); the inputs that it needs beside
    `target_tokens`; its settings' defaults. The input `sequence` (N,), which is always there, tells
    which sequence each token is of.
    """

    formula: Formula
    inputs: tuple[str, ...]
    default_settings: Mapping[str, float]


def cross_entropy(logprobs: torch.Tensor, inputs: Inputs, config: Config) -> torch.Tensor:
    """Weights may be any real number: the SDK sends gradients of a client's own loss through them.
    (N, K) with several targets per position. Without weights every target counts 1.
    """
    return -(inputs["weights"] * logprobs) if "weights" in inputs else -logprobs


def importance_sampling(logprobs: torch.Tensor, inputs: Inputs, config: Config) -> torch.Tensor:
    return -(torch.exp(_compute_log_ratio(logprobs, inputs)) * inputs["advantages"])


def ppo(logprobs: torch.Tensor, inputs: Inputs, config: Config) -> torch.Tensor:
    """The thresholds bound the ratio itself; they are not epsilons around one."""
    return _compute_clipped_loss(
        torch.exp(_compute_log_ratio(logprobs, inputs)), inputs["advantages"], config
    )


def cispo(logprobs: torch.Tensor, inputs: Inputs, config: Config) -> torch.Tensor:
    ratio = torch.exp(_compute_log_ratio(logprobs, inputs))
    weight = ratio.clamp(config["clip_low_threshold"], config["clip_high_threshold"]).detach()
    return -(weight * logprobs * inputs["advantages"])


def gspo(logprobs: torch.Tensor, inputs: Inputs, config: Config) -> torch.Tensor:
    mask, sequence = inputs["sequence_ratio_mask"], inputs["sequence"]
    log_ratio = torch.where(mask != 0, (logprobs - inputs["logprobs"]) * mask, 0.0).detach()
    sums = torch.zeros(2, int(sequence.max()) + 1, dtype=logprobs.dtype, device=logprobs.device)
    sums.index_add_(1, sequence, torch.stack([log_ratio, mask.to(logprobs.dtype)]))
    mean = (sums[0] / sums[1].clamp(min=1.0))[sequence]
    # The value of the sequence's ratio, and the gradient of each token's own log-probability.
    token_term = torch.where(inputs["advantages"] != 0, logprobs - logprobs.detach(), 0.0)
    return _compute_clipped_loss(torch.exp(mean + token_term), inputs["advantages"], config)


def dro(logprobs: torch.Tensor, inputs: Inputs, config: Config) -> torch.Tensor:
    # A sampled token is pulled back to where it was whatever its advantage; padding has neither.
    is_sampled = (inputs["advantages"] != 0) | (inputs["logprobs"] != 0)
    log_ratio = torch.where(is_sampled, logprobs - inputs["logprobs"], 0.0)
    return -(logprobs * inputs["advantages"] - 0.5 * config["beta"] * log_ratio**2)


def _compute_log_ratio(logprobs: torch.Tensor, inputs: Inputs) -> torch.Tensor:
    # Where nothing is learned the sampling logprob is padding; there r is 1, so that exp cannot
    # turn 0 into 0 * inf.
    return torch.where(inputs["advantages"] != 0, logprobs - inputs["logprobs"], 0.0)


def _compute_clipped_loss(
    ratio: torch.Tensor, advantages: torch.Tensor, config: Config
) -> torch.Tensor:
    clipped = ratio.clamp(config["clip_low_threshold"], config["clip_high_threshold"])
    return -torch.minimum(ratio * advantages, clipped * advantages)


_SAMPLING_INPUTS = ("logprobs", "advantages")
_PPO_DEFAULTS = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
LOSSES: dict[str, Loss] = {
    "cross_entropy": Loss(cross_entropy, (), {}),
    "importance_sampling": Loss(importance_sampling, _SAMPLING_INPUTS, {}),
    "ppo": Loss(ppo, _SAMPLING_INPUTS, _PPO_DEFAULTS),
    "cispo": Loss(cispo, _SAMPLING_INPUTS, {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0}),
    "gspo": Loss(gspo, (*_SAMPLING_INPUTS, "sequence_ratio_mask"), _PPO_DEFAULTS),
    "dro": Loss(dro, _SAMPLING_INPUTS, {"beta": 0.05}),
}


def resolve_settings(loss_fn: str, config: Mapping[str, object]) -> dict[str, float]:
    """The loss's settings, defaults included. Raises EngineRequestError for an unknown loss, or a
    setting that it would ignore or cannot use.
    """
    if loss_fn not in LOSSES:
        raise EngineRequestError(
            f"loss_fn {loss_fn!r} is not offered; allowed: {', '.join(LOSSES)}"
        )
    defaults = LOSSES[loss_fn].default_settings
    unknown = sorted(set(config) - set(defaults))
    if unknown:
        allowed = ", ".join(sorted(defaults)) or "none"
        raise EngineRequestError(
            f"loss_fn {loss_fn} has no setting {', '.join(unknown)}; allowed: {allowed}"
        )
    resolved = dict(defaults)
    for key, value in config.items():
        if not isinstance(value, int | float) or not 0 <= value < float("inf"):
            raise EngineRequestError(
                f"{loss_fn} setting {key} is {value!r}; a finite number that is not negative is needed"
            )
        resolved[key] = float(value)
    if resolved.get("clip_low_threshold", 0.0) > resolved.get("clip_high_threshold", 1.0):
        raise EngineRequestError(
            f"{loss_fn}: clip_low_threshold is above clip_high_threshold: {resolved}"
        )
    return resolved
