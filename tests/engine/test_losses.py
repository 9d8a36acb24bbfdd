"""Losses against values and gradients worked out in numpy."""

import numpy as np
import pytest
import torch

from lachesis.base.errors import EngineRequestError
from lachesis.engine import losses

LP = np.array([-1.0, -0.5, -2.0, -0.1])
Q = np.array([-1.2, -1.5, -1.0, 0.0])
A = np.array([0.5, 1.0, -2.0, 0.0])
R = np.exp(np.where(A != 0, LP - Q, 0.0))


MASK = np.array([1.0, 1.0, 1.0, 0.0])
SEQUENCE = np.array([0, 0, 1, 1])


def run(loss_fn, **config):
    """The loss of two sequences of two tokens, and its gradient."""
    logprobs = torch.tensor(LP, requires_grad=True)
    numbers = {
        "logprobs": Q,
        "advantages": A,
        "weights": A,
        "sequence_ratio_mask": MASK,
        "sequence": SEQUENCE,
    }
    inputs = {name: torch.tensor(value) for name, value in numbers.items()}
    value = losses.LOSSES[loss_fn].formula(
        logprobs, inputs, losses.resolve_settings(loss_fn, config)
    )
    value.sum().backward()
    assert logprobs.grad is not None
    return value.detach().numpy(), logprobs.grad.numpy()


def test_cross_entropy():
    value, gradient = run("cross_entropy")
    np.testing.assert_allclose(value, -A * LP)
    np.testing.assert_allclose(gradient, -A)


def test_importance_sampling():
    """d/dlp exp(lp - q) A = r A."""
    value, gradient = run("importance_sampling")
    np.testing.assert_allclose(value, -R * A)
    np.testing.assert_allclose(gradient, -R * A)


def test_ppo_stops_where_the_clip_binds():
    """Token 1 has r = e > 1.2 with A > 0: clipped, no gradient. Token 2 has r < 0.8 with A < 0:
    clipped too.
    """
    value, gradient = run("ppo")
    clipped = np.clip(R, 0.8, 1.2)
    np.testing.assert_allclose(value, -np.minimum(R * A, clipped * A))
    np.testing.assert_allclose(gradient, [-R[0] * A[0] if R[0] <= 1.2 else 0.0, 0.0, 0.0, 0.0])


def test_cispo_keeps_the_gradient_of_clipped_tokens():
    value, gradient = run("cispo", clip_high_threshold=2.0)
    clipped = np.clip(R, 0.0, 2.0)
    np.testing.assert_allclose(value, -clipped * LP * A)
    np.testing.assert_allclose(gradient, -clipped * A)


def test_gspo_has_one_ratio_per_sequence_and_each_token_keeps_its_gradient():
    """Sequence 0: s = exp(mean(0.2, 1.0)) = e^0.6 > 1.2 with A > 0: clipped. Sequence 1: s = e^-1 <
    0.8 with A < 0: clipped too. With wide bounds d/dlp_t = s A_t, whatever the other tokens of the
    sequence are.
    """
    mean = np.array([np.mean((LP - Q)[:2])] * 2 + [(LP - Q)[2]] * 2)
    value, gradient = run("gspo")
    np.testing.assert_allclose(value, -np.clip(np.exp(mean), 0.8, 1.2) * A)
    np.testing.assert_allclose(gradient, 0.0)
    value, gradient = run("gspo", clip_low_threshold=0.0, clip_high_threshold=9.0)
    np.testing.assert_allclose(value, -np.exp(mean) * A)
    np.testing.assert_allclose(gradient, -np.exp(mean) * A)


def test_a_token_without_advantage_cannot_overflow():
    """A padded sampling logprob of 0.0 beside a logprob of -2000 would give 0 * inf the other way
    round.
    """
    for loss_fn in ("importance_sampling", "ppo", "cispo", "gspo"):
        logprobs = torch.tensor([2000.0], requires_grad=True)
        zero = torch.tensor([0.0])
        inputs = {
            "logprobs": zero,
            "advantages": zero,
            "sequence_ratio_mask": zero,
            "sequence": torch.tensor([0]),
        }
        losses.LOSSES[loss_fn].formula(
            logprobs, inputs, losses.resolve_settings(loss_fn, {})
        ).sum().backward()
        assert logprobs.grad is not None
        assert logprobs.grad.item() == 0.0


def test_an_unknown_loss_or_setting_is_refused_by_name():
    with pytest.raises(
        EngineRequestError,
        match="'reinforce' is not supported; allowed: cross_entropy, importance_sampling, ppo, "
        "cispo",
    ):
        losses.resolve_settings("reinforce", {})
    with pytest.raises(
        EngineRequestError,
        match="importance_sampling has no setting clip_low_threshold; allowed: none",
    ):
        losses.resolve_settings("importance_sampling", {"clip_low_threshold": 0.5})
    for value in (float("nan"), -1.0, "much"):
        with pytest.raises(EngineRequestError, match="ppo setting clip_low_threshold is"):
            losses.resolve_settings("ppo", {"clip_low_threshold": value})
    with pytest.raises(EngineRequestError, match="clip_low_threshold is above clip_high_threshold"):
        losses.resolve_settings("ppo", {"clip_low_threshold": 2.0})
