"""Losses of the Tinker protocol, token-wise and summed; pure functions of tensors.

Notation: position i of a sequence predicts target i; lp is the log-probability (natural log) of the
target under the weights being trained, q the one at sampling time, A the advantage, r = exp(lp -
q). Normalisation is the client's job. No input masks tokens: a prompt token has advantage (or
weight) 0.

    cross_entropy         -sum(w lp)
    importance_sampling   -sum(r A)
    ppo                   -sum(min(r A, clip(r, low, high) A))
                          Schulman et al. 2017, arXiv:1707.06347, eq. 7
    cispo                 -sum(stop_gradient(clip(r, low, high)) lp A)
                          MiniMax-M1, arXiv:2506.13585, eq. 4
    gspo                  ppo with one ratio s per sequence, s = exp(mean of lp - q over the masked
                          tokens), in its token form, so that each token keeps its advantage
                          Zheng et al. 2025, arXiv:2507.18071, eq. 5, 7 and 13
    dro                   -sum(lp A - beta / 2 (lp - q)^2), with the advantage given by the client
                          in place of reward - value
                          Richemond et al. 2024, arXiv:2405.19107, eq. 4
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from lachesis.base.errors import EngineRequestError

Inputs = Mapping[str, torch.Tensor]
Config = Mapping[str, float]
Formula = Callable[[torch.Tensor, Inputs, Config], torch.Tensor]


@dataclass(frozen=True)
class Loss:
    """Describe a loss.

    Its function maps log-probabilities (N,) of the tokens of some sequences to losses (N,). Its
    inputs are those needed beside `target_tokens`, and its settings have defaults. The input
    `sequence` (N,), which is always available, gives the sequence of each token.
    """

    formula: Formula
    inputs: tuple[str, ...]
    default_settings: Mapping[str, float]


def cross_entropy(logprobs: torch.Tensor, inputs: Inputs, config: Config) -> torch.Tensor:
    """Compute the weighted negative log-probability; several targets per position are (N, K).

    Weights may be any real number: the SDK sends the gradients of a client's own loss through them.
    Without weights every target counts 1.
    """
    if "weights" in inputs:
        return -(inputs["weights"] * logprobs)
    return -logprobs


def importance_sampling(logprobs: torch.Tensor, inputs: Inputs, config: Config) -> torch.Tensor:
    """Weight the advantage by the probability ratio."""
    return -(torch.exp(_compute_log_ratio(logprobs, inputs)) * inputs["advantages"])


def ppo(logprobs: torch.Tensor, inputs: Inputs, config: Config) -> torch.Tensor:
    """Clip the probability ratio to thresholds of the ratio itself, not distances from 1."""
    return _compute_clipped_loss(
        torch.exp(_compute_log_ratio(logprobs, inputs)), inputs["advantages"], config
    )


def cispo(logprobs: torch.Tensor, inputs: Inputs, config: Config) -> torch.Tensor:
    """Weight the log-probability by the clipped ratio, through which no gradient flows."""
    ratio = torch.exp(_compute_log_ratio(logprobs, inputs))
    weight = ratio.clamp(config["clip_low_threshold"], config["clip_high_threshold"]).detach()
    return -(weight * logprobs * inputs["advantages"])


def gspo(logprobs: torch.Tensor, inputs: Inputs, config: Config) -> torch.Tensor:
    """Clip one ratio per sequence, the geometric mean of its tokens' ratios."""
    mask, sequence = inputs["sequence_ratio_mask"], inputs["sequence"]
    log_ratio = torch.where(mask != 0, (logprobs - inputs["logprobs"]) * mask, 0.0).detach()
    sums = torch.zeros(2, int(sequence.max()) + 1, dtype=logprobs.dtype, device=logprobs.device)
    sums.index_add_(1, sequence, torch.stack([log_ratio, mask.to(logprobs.dtype)]))
    mean = (sums[0] / sums[1].clamp(min=1.0))[sequence]
    # This has the value of the sequence's ratio and the gradient of each token's log-probability.
    token_term = torch.where(inputs["advantages"] != 0, logprobs - logprobs.detach(), 0.0)
    return _compute_clipped_loss(torch.exp(mean + token_term), inputs["advantages"], config)


def dro(logprobs: torch.Tensor, inputs: Inputs, config: Config) -> torch.Tensor:
    """Subtract a quadratic penalty on the change of each token's log-probability."""
    # The penalty applies to every sampled token, also with advantage 0, and not to padding.
    is_sampled = (inputs["advantages"] != 0) | (inputs["logprobs"] != 0)
    log_ratio = torch.where(is_sampled, logprobs - inputs["logprobs"], 0.0)
    return -(logprobs * inputs["advantages"] - 0.5 * config["beta"] * log_ratio**2)


def _compute_log_ratio(logprobs: torch.Tensor, inputs: Inputs) -> torch.Tensor:
    # Tokens with advantage 0 have padding as their sampling log-probability. Their ratio is set to
    # 1, so that the product is 0 and not 0 * inf.
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
    """Return the settings of a loss with defaults filled in.

    Raises:
        EngineRequestError: The loss is unknown, or it has no such setting or cannot use its value.
    """
    if loss_fn not in LOSSES:
        raise EngineRequestError(
            f"loss_fn {loss_fn!r} is not supported; allowed: {', '.join(LOSSES)}"
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
                f"{loss_fn} setting {key} is {value!r}; allowed: a finite number of at least 0"
            )
        resolved[key] = float(value)
    if resolved.get("clip_low_threshold", 0.0) > resolved.get("clip_high_threshold", 1.0):
        raise EngineRequestError(
            f"{loss_fn}: clip_low_threshold is above clip_high_threshold: {resolved}"
        )
    return resolved
