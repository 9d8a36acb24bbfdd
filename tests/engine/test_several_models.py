"""One engine that serves a student and a teacher of another size."""

import numpy as np
import pytest
import tinker
import torch
from transformers import AutoModelForCausalLM

from lachesis.base.tinker_client import wait_for_sdk
from lachesis.tiny_model import build
from tests.engine.training_steps import PROMPT, datums, ids, step


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    recipe = build.TinyModelRecipe(steps=0, layers=1, hidden_size=96, seed=5)
    return str(build.ensure_tiny_model(recipe, tmp_path_factory.mktemp("teacher")))


@pytest.fixture(scope="module")
def two(start_engine, random_model, teacher):
    return start_engine(random_model, further=[teacher])


@pytest.fixture(scope="module")
def client(two):
    service = tinker.ServiceClient(base_url=two.url, api_key=two.token)
    yield service
    if hasattr(service, "close"):  # The oldest SDK has no such operation.
        wait_for_sdk(service.close("success"))


def expected(model):
    module = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        logits = module(torch.tensor([PROMPT])).logits[0, :-1]
    rows = torch.log_softmax(logits, -1)
    return rows[torch.arange(len(PROMPT) - 1), torch.tensor(PROMPT[1:])].numpy()


def test_each_model_is_sampled_and_trained_as_itself(client, random_model, teacher):
    """Both at once: prompts are scored by the model that was asked, and training of one leaves the
    other alone.
    """
    served = client.get_server_capabilities().supported_models
    assert [model.model_name for model in served] == [random_model, teacher]
    samplers = {
        name: wait_for_sdk(client.create_sampling_client(base_model=name))
        for name in (random_model, teacher)
    }
    training = wait_for_sdk(client.create_lora_training_client(base_model=teacher, rank=4, seed=0))
    assert training.get_info().model_name == teacher
    step(training, datums())
    waiting = [
        (name, sampler.compute_logprobs(ids(PROMPT)))
        for _ in range(4)
        for name, sampler in samplers.items()
    ]
    for name, future in waiting:
        np.testing.assert_allclose(future.result()[1:], expected(name), atol=1e-3)
    trained = wait_for_sdk(training.save_weights_and_get_sampling_client())
    changed = np.array(trained.compute_logprobs(ids(PROMPT)).result()[1:], dtype=np.float64)
    assert np.abs(changed - expected(teacher)).max() > 1e-3


def test_a_checkpoint_belongs_to_the_model_that_it_was_made_with(client, random_model, teacher):
    training = wait_for_sdk(client.create_lora_training_client(base_model=teacher, rank=4, seed=0))
    step(training, datums())
    state = training.save_state("teacher").result().path
    weights = training.save_weights_for_sampler("teacher").result().path
    again = wait_for_sdk(client.create_training_client_from_state(state))
    assert again.get_info().model_name == teacher
    before, after = (
        one.forward(datums(), "importance_sampling").result().metrics["loss:sum"]
        for one in (training, again)
    )
    assert before == after
    sampler = wait_for_sdk(client.create_sampling_client(model_path=weights))
    assert len(sampler.compute_logprobs(ids(PROMPT)).result()) == len(PROMPT)
    student = wait_for_sdk(client.create_lora_training_client(base_model=random_model, rank=4))
    with pytest.raises(tinker.RequestFailedError, match="is an adapter of"):
        student.load_state(state).result()
    with pytest.raises(tinker.BadRequestError, match="this engine serves"):
        wait_for_sdk(client.create_sampling_client(base_model="Qwen/Qwen3-8B"))
