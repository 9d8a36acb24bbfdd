"""The rehearsal cloud itself: the real SDK meets models, bills and misfortunes."""

import time

import httpx
import numpy as np
import pytest
import tinker

from lachesis.config.prices import find_prices
from tests.tinker_cloud.stand_ins import STAND_INS

MODEL = "Qwen/Qwen3-8B"
PROMPT = list(b"2 3 make 5:")


@pytest.fixture
def service(cloud):
    client = tinker.ServiceClient()
    yield client
    cloud.lift()
    client.close("success").result()


def sample(client, num_samples=2):
    params = tinker.SamplingParams(max_tokens=4, temperature=1.0, seed=1)
    prompt = tinker.ModelInput.from_ints(PROMPT)
    return client.sample(prompt, num_samples, params).result()


def make_datum():
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(PROMPT[:-1]),
        loss_fn_inputs={
            "target_tokens": np.asarray(PROMPT[1:], np.int64),
            "weights": np.ones(len(PROMPT) - 1, np.float32),
        },
    )


def test_all_stand_ins_are_offered_and_sampled(service):
    offered = [one.model_name for one in service.get_server_capabilities().supported_models]
    assert offered == list(STAND_INS)
    for name in STAND_INS:
        answer = sample(service.create_sampling_client(base_model=name).result())
        assert len(answer.sequences) == 2


def test_the_bill_agrees_to_the_token(cloud, service):
    before = cloud.cloud.bill.tokens.get(MODEL)
    before = before.model_copy() if before else None
    training = service.create_lora_training_client(base_model=MODEL, rank=4).result()
    training.forward_backward([make_datum()] * 3, "cross_entropy").result()
    training.optim_step(tinker.AdamParams(learning_rate=1e-3)).result()
    training.forward([make_datum()], "cross_entropy").result()
    sampler = training.save_weights_and_get_sampling_client().result()
    answer = sample(sampler, num_samples=3)
    tokens = cloud.cloud.bill.tokens[MODEL]
    used = {
        kind: getattr(tokens, kind) - (getattr(before, kind) if before else 0)
        for kind in ("prefill", "sampled", "trained")
    }
    assert used == {
        "prefill": len(PROMPT) + len(PROMPT) - 1,
        "sampled": sum(len(one.tokens) for one in answer.sequences),
        "trained": 3 * (len(PROMPT) - 1),
    }
    prices = find_prices(MODEL)
    assert prices is not None
    assert cloud.cloud.bill.compute_cost() >= prices.compute_cost(tokens)


@pytest.mark.parametrize("kind", ["cut", "lost", "server_error", "rate_limit"])
def test_what_passes_is_waited_out_and_billed_once(cloud, service, kind):
    client = service.create_sampling_client(base_model=MODEL).result()
    before = cloud.cloud.bill.tokens[MODEL].sampled if MODEL in cloud.cloud.bill.tokens else 0
    cloud.begin(kind, count=2)
    answer = sample(client)
    assert cloud.cloud.faults[0].num_met == 2
    num_sampled = sum(len(one.tokens) for one in answer.sequences)
    assert cloud.cloud.bill.tokens[MODEL].sampled - before == num_sampled


def test_a_queue_is_waited_for(cloud, service):
    client = service.create_sampling_client(base_model=MODEL).result()
    cloud.begin("queued", seconds=1.5)
    started = time.monotonic()
    sample(client)
    assert time.monotonic() - started > 1.4


def test_a_revoked_key_is_refused_at_once(cloud, service):
    client = service.create_sampling_client(base_model=MODEL).result()
    cloud.begin("revoked")
    with pytest.raises(tinker.APIStatusError, match="revoked"):
        sample(client)


def test_an_expired_session_has_no_sampler(cloud, service):
    client = service.create_sampling_client(base_model=MODEL).result()
    cloud.begin("session_expired")
    with pytest.raises(tinker.APIStatusError, match="session may have ended"):
        sample(client)


def test_a_retired_model_is_neither_listed_nor_made(cloud, service):
    cloud.begin("model_retired", model=MODEL)
    offered = [one.model_name for one in service.get_server_capabilities().supported_models]
    assert MODEL not in offered
    with pytest.raises(tinker.BadRequestError, match="not supported"):
        service.create_sampling_client(base_model=MODEL).result()


def test_a_stale_sampler_has_the_weights_before(cloud, service):
    cloud.begin("stale_sampler")
    training = service.create_lora_training_client(base_model=MODEL, rank=4, seed=1).result()
    prompt = tinker.ModelInput.from_ints(PROMPT)
    first = training.save_weights_and_get_sampling_client().result()
    before = first.compute_logprobs(prompt).result()
    training.forward_backward([make_datum()], "cross_entropy").result()
    training.optim_step(tinker.AdamParams(learning_rate=0.05)).result()
    second = training.save_weights_and_get_sampling_client().result()
    assert second.compute_logprobs(prompt).result() == before
    cloud.lift()
    third = training.save_weights_and_get_sampling_client().result()
    assert third.compute_logprobs(prompt).result() != before


def test_noise_changes_logprobs_by_little(cloud, service):
    client = service.create_sampling_client(base_model=MODEL).result()
    prompt = tinker.ModelInput.from_ints(PROMPT)
    exact = np.asarray(client.compute_logprobs(prompt).result()[1:], float)
    cloud.begin("bfloat16")
    rounded = np.asarray(client.compute_logprobs(prompt).result()[1:], float)
    assert 0 < np.abs(rounded - exact).max() < 0.02
    cloud.lift()
    cloud.begin("order_noise", scale=0.01)
    noisy = [client.compute_logprobs(prompt).result()[1:] for _ in range(2)]
    assert noisy[0] != noisy[1]


def test_checkpoints_expire_and_downloads_break(cloud, service):
    cloud.begin("time_to_live", seconds=3600)
    training = service.create_lora_training_client(base_model=MODEL, rank=4).result()
    path = training.save_weights_for_sampler("kept").result().path
    rest = tinker.RestClient()
    run = path.removeprefix("tinker://").split("/")[0]
    (checkpoint,) = rest.list_checkpoints(run).result().checkpoints
    assert checkpoint.expires_at is not None
    address = f"{cloud.url}/api/v1/training_runs/{run}/checkpoints/{checkpoint.checkpoint_id}"
    headers = {"x-api-key": "tml-rehearsal"}
    urls = httpx.get(f"{address}/external_weights_urls", headers=headers).json()["urls"]
    url = urls["adapter_model.safetensors"]
    cloud.begin("broken_download", count=1)
    with pytest.raises(httpx.RemoteProtocolError):
        httpx.get(url)
    whole = httpx.get(url)
    rest_of_it = httpx.get(url, headers={"range": "bytes=100-"})
    assert (rest_of_it.status_code, rest_of_it.content) == (206, whole.content[100:])
