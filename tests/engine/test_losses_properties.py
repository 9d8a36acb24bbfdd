"""What holds of the losses for any log-probabilities, advantages and settings."""

import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from lachesis.base.errors import EngineRequestError
from lachesis.engine import losses
from tests.harness.properties import examples

BY_RATIO = ["importance_sampling", "ppo", "cispo", "gspo"]
CLIPPED = ["ppo", "cispo", "gspo"]
NOT_STOPPED = ["cross_entropy", "importance_sampling", "ppo", "dro"]
"""Losses whose gradient is that of their value; the other two stop one on purpose."""
LOGPROB = st.floats(-6, -0.01)
ADVANTAGE = st.floats(-3, 3).map(lambda value: round(value, 3))


@st.composite
def tokens(draw, *, least=1):
    """Some tokens of some sequences, of which some are prompt: no advantage, no mask, no sampling
    log-probability.
    """
    count = draw(st.integers(least, 6))
    columns = {
        "lp": LOGPROB,
        "logprobs": LOGPROB,
        "advantages": ADVANTAGE,
        "sequence_ratio_mask": st.sampled_from([0.0, 1.0]),
        "sequence": st.integers(0, 2),
    }
    made = {
        name: np.array([draw(values) for _ in range(count)]) for name, values in columns.items()
    }
    for name in ("logprobs", "advantages"):
        made[name] = np.where(made["sequence_ratio_mask"] > 0, made[name], 0.0)
    return made


def run(loss_fn, made, **config):
    """The value of each token and the gradient of their sum."""
    logprobs = torch.tensor(made["lp"], dtype=torch.float64, requires_grad=True)
    inputs = {name: torch.tensor(values) for name, values in made.items() if name != "lp"}
    inputs["weights"] = inputs["advantages"]
    value = losses.LOSSES[loss_fn].formula(
        logprobs, inputs, losses.resolve_settings(loss_fn, config)
    )
    (gradient,) = torch.autograd.grad(value.sum(), logprobs, allow_unused=True)
    return value.detach().numpy(), np.zeros(
        len(made["lp"])
    ) if gradient is None else gradient.numpy()


def changed(made, **columns):
    return {**made, **columns}


@examples(st.sampled_from(NOT_STOPPED), tokens())
def test_the_gradient_is_that_of_the_value(loss_fn, made):
    """By central differences, away from the corners of the clip."""
    ratio = np.exp(np.where(made["advantages"] != 0, made["lp"] - made["logprobs"], 0.0))
    if loss_fn == "ppo" and (np.abs(np.subtract.outer([0.8, 1.2], ratio)) < 1e-3).any():
        return
    gradient = run(loss_fn, made)[1]
    for index in range(len(gradient)):
        step = np.zeros(len(gradient))
        step[index] = 1e-6
        up, down = (
            run(loss_fn, changed(made, lp=made["lp"] + sign * step))[0].sum() for sign in (1, -1)
        )
        assert gradient[index] == pytest.approx((up - down) / 2e-6, rel=1e-4, abs=1e-5)


@examples(tokens())
def test_the_gradient_of_losses_that_stop_one_is_the_papers(made):
    """CISPO: -clip(r) A, whatever the clip does; GSPO inside wide bounds: -s A."""
    lp, q, advantages = made["lp"], made["logprobs"], made["advantages"]
    ratio = np.exp(np.where(advantages != 0, lp - q, 0.0))
    np.testing.assert_allclose(
        run("cispo", made)[1], -np.clip(ratio, 0, 4) * advantages, rtol=1e-9, atol=1e-12
    )
    mask, sequence = made["sequence_ratio_mask"], made["sequence"]
    members = [(sequence == number) & (mask > 0) for number in sequence]
    mean = np.array([(lp - q)[own].mean() if own.any() else 0.0 for own in members])
    value, gradient = run("gspo", made, clip_low_threshold=0.0, clip_high_threshold=1e9)
    np.testing.assert_allclose(value, -np.exp(mean) * advantages, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(gradient, -np.exp(mean) * advantages, rtol=1e-9, atol=1e-12)


@examples(st.sampled_from(CLIPPED), tokens())
def test_a_clipped_loss_is_the_unclipped_one_inside_its_bounds(loss_fn, made):
    """PPO gives the values of importance sampling, and all three its gradients; GSPO where each
    token is a sequence.
    """
    made = changed(made, sequence=np.arange(len(made["lp"])))
    value, gradient = run(loss_fn, made, clip_low_threshold=0.0, clip_high_threshold=1e9)
    plain, plain_gradient = run("importance_sampling", made)
    np.testing.assert_allclose(gradient, plain_gradient, rtol=1e-9, atol=1e-12)
    if loss_fn != "cispo":
        np.testing.assert_allclose(value, plain, rtol=1e-9, atol=1e-12)


@examples(tokens(), st.floats(0, 1), st.floats(1, 3))
def test_ppo_is_never_more_hopeful_than_importance_sampling(made, low, high):
    """And has its gradient or none."""
    value, gradient = run("ppo", made, clip_low_threshold=low, clip_high_threshold=high)
    plain, plain_gradient = run("importance_sampling", made)
    assert (value >= plain - 1e-12).all()
    same = np.isclose(gradient, plain_gradient, rtol=1e-9, atol=1e-12)
    at_corner = np.isin(np.exp(made["lp"] - made["logprobs"]), [low, high])
    assert (same | (gradient == 0) | at_corner).all()


@examples(st.sampled_from(sorted(losses.LOSSES)), tokens(), st.floats(-6000, 6000))
def test_a_masked_token_never_contributes(loss_fn, made, other):
    """Whatever its log-probability is, and neither to its own loss nor to that of the others."""
    prompt = made["sequence_ratio_mask"] == 0
    value, gradient = run(loss_fn, made)
    assert (value[prompt] == 0).all()
    assert (gradient[prompt] == 0).all()
    moved, moved_gradient = run(loss_fn, changed(made, lp=np.where(prompt, other, made["lp"])))
    np.testing.assert_array_equal(moved, value)
    np.testing.assert_array_equal(moved_gradient, gradient)


@examples(
    st.sampled_from(sorted(losses.LOSSES)), tokens(least=2), st.randoms(use_true_random=False)
)
def test_the_order_of_tokens_does_not_matter(loss_fn, made, random):
    order = list(range(len(made["lp"])))
    random.shuffle(order)
    both = zip(
        run(loss_fn, made),
        run(loss_fn, {name: values[order] for name, values in made.items()}),
        strict=True,
    )
    for plain, shuffled in both:
        np.testing.assert_allclose(shuffled, plain[order], rtol=1e-9, atol=1e-12)


@examples(st.sampled_from(["cross_entropy", *BY_RATIO]), tokens(), st.floats(0.1, 10))
def test_a_loss_is_in_proportion_to_the_advantages(loss_fn, made, factor):
    both = zip(
        run(loss_fn, made),
        run(loss_fn, changed(made, advantages=factor * made["advantages"])),
        strict=True,
    )
    for plain, scaled in both:
        np.testing.assert_allclose(scaled, factor * plain, rtol=1e-9, atol=1e-12)


@examples(tokens())
def test_on_policy_every_loss_has_the_policy_gradient(made):
    """Where the weights in training are those that sampled, the ratio is 1, and the gradient -A."""
    sampled = made["sequence_ratio_mask"] > 0
    made = changed(made, logprobs=np.where(sampled, made["lp"], 0.0))
    for loss_fn in losses.LOSSES:
        np.testing.assert_allclose(
            run(loss_fn, made)[1], -made["advantages"], rtol=1e-9, atol=1e-12, err_msg=loss_fn
        )


@examples(tokens(), st.floats(0, 5))
def test_dro_pulls_back_by_the_distance(made, beta):
    moved = np.where(made["sequence_ratio_mask"] > 0, made["lp"] - made["logprobs"], 0.0)
    value, gradient = run("dro", made, beta=beta)
    np.testing.assert_allclose(
        value, -made["lp"] * made["advantages"] + beta / 2 * moved**2, rtol=1e-9, atol=1e-12
    )
    np.testing.assert_allclose(gradient, -made["advantages"] + beta * moved, rtol=1e-9, atol=1e-12)


@examples(tokens())
def test_cross_entropy_without_weights_counts_each_token_once(made):
    value = losses.cross_entropy(torch.tensor(made["lp"]), {}, {})
    np.testing.assert_array_equal(value.numpy(), -made["lp"])


@examples(
    st.sampled_from([*losses.LOSSES, "reinforce"]),
    st.dictionaries(
        st.sampled_from(["clip_low_threshold", "clip_high_threshold", "beta", "gamma"]),
        st.floats() | st.integers(-2, 3) | st.sampled_from(["1", None]),
        max_size=3,
    ),
)
def test_settings_are_complete_and_sound_or_refused(loss_fn, config):
    try:
        numbers = losses.resolve_settings(loss_fn, config)
    except EngineRequestError:
        known = losses.LOSSES[loss_fn].default_settings if loss_fn in losses.LOSSES else {}
        merged = {**known, **config}
        finite = all(
            isinstance(value, int | float) and 0 <= value < float("inf")
            for value in config.values()
        )
        ordered = finite and merged.get("clip_low_threshold", 0.0) <= merged.get(
            "clip_high_threshold", 1.0
        )
        assert loss_fn not in losses.LOSSES or set(config) - set(known) or not finite or not ordered
        return
    assert set(numbers) == set(losses.LOSSES[loss_fn].default_settings)
    assert all(np.isfinite(value) and value >= 0 for value in numbers.values())
    assert numbers.get("clip_low_threshold", 0.0) <= numbers.get("clip_high_threshold", 1.0)
    assert {name: float(value) for name, value in config.items()}.items() <= numbers.items()
