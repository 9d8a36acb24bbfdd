"""Losses against values and gradients worked out in numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lachesis.engine import losses
from lachesis.errors import EngineRequestError

LP = np.array([-1.0, -0.5, -2.0, -0.1])
Q = np.array([-1.2, -1.5, -1.0, 0.0])
A = np.array([0.5, 1.0, -2.0, 0.0])
R = np.exp(np.where(A != 0, LP - Q, 0.0))


def run(loss_fn: str, **config: float) -> tuple[np.ndarray, np.ndarray]:
    logprobs = torch.tensor(LP, requires_grad=True)
    inputs = {"logprobs": torch.tensor(Q), "advantages": torch.tensor(A), "weights": torch.tensor(A)}
    value = losses.LOSSES[loss_fn](logprobs, inputs, losses.check(loss_fn, config))
    value.sum().backward()
    assert logprobs.grad is not None
    return value.detach().numpy(), logprobs.grad.numpy()


def test_cross_entropy() -> None:
    value, gradient = run("cross_entropy")
    np.testing.assert_allclose(value, -A * LP)
    np.testing.assert_allclose(gradient, -A)


def test_importance_sampling() -> None:
    """d/dlp exp(lp - q) A = r A."""
    value, gradient = run("importance_sampling")
    np.testing.assert_allclose(value, -R * A)
    np.testing.assert_allclose(gradient, -R * A)


def test_ppo_stops_where_the_clip_binds() -> None:
    """Token 1 has r = e > 1.2 with A > 0: clipped, no gradient. Token 2 has r < 0.8 with A < 0: clipped too."""
    value, gradient = run("ppo")
    clipped = np.clip(R, 0.8, 1.2)
    np.testing.assert_allclose(value, -np.minimum(R * A, clipped * A))
    np.testing.assert_allclose(gradient, [-R[0] * A[0] if R[0] <= 1.2 else 0.0, 0.0, 0.0, 0.0])


def test_cispo_keeps_the_gradient_of_clipped_tokens() -> None:
    value, gradient = run("cispo", clip_high_threshold=2.0)
    clipped = np.clip(R, 0.0, 2.0)
    np.testing.assert_allclose(value, -clipped * LP * A)
    np.testing.assert_allclose(gradient, -clipped * A)


def test_a_token_without_advantage_cannot_overflow() -> None:
    """A padded sampling logprob of 0.0 beside a logprob of -2000 would give 0 * inf the other way round."""
    logprobs = torch.tensor([2000.0], requires_grad=True)
    inputs = {"logprobs": torch.tensor([0.0]), "advantages": torch.tensor([0.0])}
    losses.importance_sampling(logprobs, inputs, {}).sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.item() == 0.0


def test_an_unknown_loss_or_setting_is_refused_by_name() -> None:
    with pytest.raises(
        EngineRequestError, match="'dro' is not offered; allowed: cross_entropy, importance_sampling, ppo, cispo"
    ):
        losses.check("dro", {})
    with pytest.raises(EngineRequestError, match="importance_sampling has no setting clip_low_threshold; allowed: none"):
        losses.check("importance_sampling", {"clip_low_threshold": 0.5})
