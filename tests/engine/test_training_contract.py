"""The real `tinker` SDK trains on the engine: losses, gradients, Adam, and resuming."""

import numpy as np
import pytest
import tinker
import torch

from lachesis.base.tinker_client import wait_for_sdk
from tests.engine.training_steps import (
    ADAM,
    Reference,
    checkpoint_folder,
    datums,
    ids,
    logprobs_of,
    step,
)
from tests.harness.sdk_versions import needs_sdk


@pytest.mark.parametrize("kind", ["importance_sampling", "ppo", "cispo"])
def test_losses_gradients_and_adam_agree_with_plain_torch(training, engine, kind):
    """Three steps: losses and logprobs agree before each, the weights after the last."""
    start = training.save_weights_for_sampler("start").result().path
    reference = Reference(engine.model, checkpoint_folder(engine, start), rank=8)
    for number in range(3):
        data = datums(seed=number)
        expected_logprobs = [reference.logprobs(datum).detach().numpy() for datum in data]
        output = step(training, data, kind)
        for ours, theirs in zip(logprobs_of(output), expected_logprobs, strict=True):
            np.testing.assert_allclose(ours, theirs, atol=2e-4)
        assert output.metrics["loss:sum"] == pytest.approx(reference.train(data, kind), rel=1e-3)
    end = training.save_weights_for_sampler("end").result().path
    after = Reference(engine.model, checkpoint_folder(engine, end), rank=8).params
    for key, value in reference.params.items():
        np.testing.assert_allclose(
            after[key].detach().numpy(), value.detach().numpy(), atol=1e-3, err_msg=key
        )


def test_cross_entropy_takes_real_weights_and_several_targets(training):
    """The SDK sends gradients of a client's own loss as weights of any sign."""
    tokens = [1, 2, 3]
    targets = np.array([[2, 5], [3, 6], [4, 7]])
    weights = np.array([[1.0, -0.5], [0.0, 2.0], [0.25, 0.0]], np.float32)
    datum = tinker.Datum(
        model_input=ids(tokens), loss_fn_inputs={"target_tokens": targets, "weights": weights}
    )
    output = training.forward_backward([datum], "cross_entropy").result()
    (logprobs,) = logprobs_of(output)
    assert logprobs.shape == (3, 2)
    assert output.metrics["loss:sum"] == pytest.approx(-(weights * logprobs).sum(), rel=1e-5)


def test_a_custom_loss_of_the_client_trains(training):
    """forward_backward_custom runs the loss at the client and sends its gradient back."""

    def loss(data, logprobs):
        total = torch.stack([logprob.square().sum() for logprob in logprobs]).sum()
        return total, {"mine": float(total.detach())}

    data = [
        tinker.Datum(
            model_input=ids([1, 2, 3]), loss_fn_inputs={"target_tokens": np.array([2, 3, 4])}
        )
    ]
    before = training.forward_backward_custom(data, loss).result().metrics["mine"]
    training.optim_step(tinker.AdamParams(**ADAM)).result()
    after = training.forward_backward_custom(data, loss).result().metrics["mine"]
    assert after < before


def test_forward_adds_no_gradient(training):
    training.forward(datums(), "importance_sampling").result()
    assert training.optim_step(tinker.AdamParams(**ADAM)).result().metrics["grad_norm"] == 0.0


def test_gradients_add_up_until_the_step(service, engine):
    """Two passes of a half each make the step of one pass of the whole."""
    whole, parts = (
        wait_for_sdk(service.create_lora_training_client(base_model=engine.model, rank=8, seed=1))
        for _ in range(2)
    )
    data = datums(4)
    whole.forward_backward(data, "importance_sampling").result()
    for half in (data[:2], data[2:]):
        parts.forward_backward(half, "importance_sampling").result()
    norms = [
        client.optim_step(tinker.AdamParams(**ADAM)).result().metrics["grad_norm"]
        for client in (whole, parts)
    ]
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)


def test_the_gradient_is_clipped_to_the_norm_that_was_asked(service, engine):
    """Adam divides by the gradient's size, so eps is made large for the clip to show in the
    weights.
    """

    def moved(**options):
        client = wait_for_sdk(
            service.create_lora_training_client(base_model=engine.model, rank=8, seed=1)
        )
        client.forward_backward(datums(), "importance_sampling").result()
        client.optim_step(tinker.AdamParams(learning_rate=1.0, eps=1e6, **options)).result()
        from safetensors.torch import load_file

        path = client.save_weights_for_sampler("clipped").result().path
        tensors = load_file(checkpoint_folder(engine, path) / "adapter_model.safetensors")
        return float(sum(value.abs().sum() for key, value in tensors.items() if "lora_B" in key))

    assert moved(grad_clip_norm=1e-3) < 0.1 * moved()


def test_two_clients_do_not_see_each_other(service, engine):
    one, other = (
        wait_for_sdk(service.create_lora_training_client(base_model=engine.model, rank=r, seed=1))
        for r in (4, 8)
    )
    before = logprobs_of(other.forward(datums(), "importance_sampling").result())
    step(one, datums())
    after = logprobs_of(other.forward(datums(), "importance_sampling").result())
    for a, b in zip(before, after, strict=True):
        np.testing.assert_array_equal(a, b)


def test_state_with_optimizer_continues_exactly_and_without_it_does_not(service, training):
    step(training, datums(seed=1))
    path = training.save_state("middle").result().path
    with_adam = wait_for_sdk(service.create_training_client_from_state_with_optimizer(path))
    without = wait_for_sdk(service.create_training_client_from_state(path))
    results = []
    for client in (training, with_adam, without):
        step(client, datums(seed=2))
        results.append(
            client.forward_backward(datums(seed=3), "importance_sampling")
            .result()
            .metrics["loss:sum"]
        )
    assert results[0] == results[1]
    assert results[0] != results[2]


@needs_sdk("0.30", "clients that can be closed")
def test_a_resumed_run_equals_an_uninterrupted_one(service, engine, start_engine, random_model):
    """Four steps in one engine, and two, a checkpoint, another engine process, two more: the same
    losses, bit for bit.
    """

    def losses(client, numbers):
        return [step(client, datums(seed=number)).metrics["loss:sum"] for number in numbers]

    whole = losses(
        wait_for_sdk(service.create_lora_training_client(base_model=random_model, rank=8, seed=3)),
        range(4),
    )
    interrupted = wait_for_sdk(
        service.create_lora_training_client(base_model=random_model, rank=8, seed=3)
    )
    parts = losses(interrupted, range(2))
    path = interrupted.save_state("stop").result().path
    second = start_engine(random_model, engine.store)
    with tinker.ServiceClient(base_url=second.url, api_key=second.token) as other:
        parts += losses(
            wait_for_sdk(other.create_training_client_from_state_with_optimizer(path)), range(2, 4)
        )
    assert parts == whole
