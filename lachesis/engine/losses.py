"""Losses of the Tinker protocol, token-wise and summed; pure functions of tensors.

Notation: position i of a sequence predicts target i; lp is the log-probability (natural log) of the target under the
weights being trained, q the one at sampling time, A the advantage, r = exp(lp - q). Normalisation is the client's job.
No input masks tokens: a prompt token has advantage (or weight) 0.

    cross_entropy         -sum(w lp)
    importance_sampling   -sum(r A)
    ppo                   -sum(min(r A, clip(r, low, high) A))        Schulman et al. 2017, arXiv:1707.06347, eq. 7
    cispo                 -sum(stop_gradient(clip(r, low, high)) lp A)  MiniMax-M1, arXiv:2506.13585, eq. 4
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from lachesis.errors import EngineRequestError

Inputs = Mapping[str, torch.Tensor]
Config = Mapping[str, float]
Loss = Callable[[torch.Tensor, Inputs, Config], torch.Tensor]


def cross_entropy(logprobs: torch.Tensor, inputs: Inputs, config: Config) -> torch.Tensor:
    """Weights may be any real number: the SDK sends gradients of a client's own loss through them."""
    return -(inputs["weights"] * logprobs)


def importance_sampling(logprobs: torch.Tensor, inputs: Inputs, config: Config) -> torch.Tensor:
    return -(_ratio(logprobs, inputs) * inputs["advantages"])


def ppo(logprobs: torch.Tensor, inputs: Inputs, config: Config) -> torch.Tensor:
    """The thresholds bound the ratio itself; they are not epsilons around one."""
    ratio = _ratio(logprobs, inputs)
    low, high = config.get("clip_low_threshold", 0.8), config.get("clip_high_threshold", 1.2)
    advantages = inputs["advantages"]
    return -torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)


def cispo(logprobs: torch.Tensor, inputs: Inputs, config: Config) -> torch.Tensor:
    low, high = config.get("clip_low_threshold", 0.0), config.get("clip_high_threshold", 4.0)
    clipped = _ratio(logprobs, inputs).clamp(low, high).detach()
    return -(clipped * logprobs * inputs["advantages"])


def _ratio(logprobs: torch.Tensor, inputs: Inputs) -> torch.Tensor:
    # Where nothing is learned the sampling logprob is padding; there r is 1, so that exp cannot turn 0 into 0 * inf.
    learned = inputs["advantages"] != 0
    return torch.exp(torch.where(learned, logprobs - inputs["logprobs"], 0.0))


LOSSES: dict[str, Loss] = {
    "cross_entropy": cross_entropy,
    "importance_sampling": importance_sampling,
    "ppo": ppo,
    "cispo": cispo,
}
_CLIP = frozenset({"clip_low_threshold", "clip_high_threshold"})
CONFIG_KEYS: dict[str, frozenset[str]] = {
    "cross_entropy": frozenset(),
    "importance_sampling": frozenset(),
    "ppo": _CLIP,
    "cispo": _CLIP,
}


def check(loss_fn: str, config: Mapping[str, object]) -> dict[str, float]:
    """The loss's numbers. Raises EngineRequestError for an unknown loss, or a configuration key that it would ignore."""
    if loss_fn not in LOSSES:
        raise EngineRequestError(f"loss_fn {loss_fn!r} is not offered; allowed: {', '.join(LOSSES)}")
    unknown = sorted(set(config) - CONFIG_KEYS[loss_fn])
    if unknown:
        allowed = ", ".join(sorted(CONFIG_KEYS[loss_fn])) or "none"
        raise EngineRequestError(f"loss_fn {loss_fn} has no setting {', '.join(unknown)}; allowed: {allowed}")
    numbers: dict[str, float] = {}
    for key, value in config.items():
        if not isinstance(value, int | float):
            raise EngineRequestError(f"{loss_fn} setting {key} is {value!r}; a number is needed")
        numbers[key] = float(value)
    return numbers
