"""Compute log-probabilities of target tokens from logits, with little memory."""

from typing import Any

import torch

# Logits (tokens, vocabulary) are the largest tensor of a pass; this is a quarter of a GiB in
# float32. More are computed in parts.
MAX_LOGITS_PER_PART = 2**26


class TargetLogprobs(torch.autograd.Function):
    """Compute log softmax of logits (N, V) at targets (N, K): l_t - logsumexp(l).

    Its gradient is 1[v = t] - softmax(l)_v. It is written over the logits, which are the largest
    tensor and are not needed afterwards.
    """

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        log_normalizer = torch.logsumexp(logits, -1, keepdim=True)
        ctx.save_for_backward(logits, log_normalizer, targets)
        return logits.gather(1, targets) - log_normalizer

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        logits, log_normalizer, targets = ctx.saved_tensors
        logits_gradient = logits.sub_(log_normalizer).exp_().mul_(-gradient.sum(1, keepdim=True))
        return logits_gradient.scatter_add_(1, targets, gradient), None
