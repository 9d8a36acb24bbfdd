"""Sampling through the real SDK."""

import asyncio
import time

import httpx
import numpy as np
import pytest
import tinker
import torch

from lachesis.base.tinker_client import call_sdk, wait_for_sdk
from lachesis.engine.sampling.token_choice import TokenChoiceSettings, choose_tokens
from tests.harness.sdk_versions import needs_sdk

PROMPT = tinker.ModelInput.from_ints([256, 18, 10, 19, 28, 258, 257])


@pytest.fixture(scope="module")
def sampler(service, engine):
    return wait_for_sdk(service.create_sampling_client(base_model=engine.model))


def sample(sampler, n=1, **params):
    wanted = {"max_tokens": 12, "temperature": 1.0, "stop": [], **params}
    return list(sampler.sample(PROMPT, n, tinker.SamplingParams(**wanted)).result().sequences)


def test_samples_differ_and_are_cut_at_the_limit(sampler):
    found = sample(sampler, n=8)
    assert len({tuple(one.tokens) for one in found}) > 1
    assert all(len(one.tokens) == len(one.logprobs or []) == 12 for one in found)
    assert {one.stop_reason for one in found} == {"length"}


def test_a_seed_fixes_the_samples_whatever_else_is_in_the_batch(sampler):
    alone = [one.tokens for one in sample(sampler, n=3, seed=5)]
    params = tinker.SamplingParams(max_tokens=12, temperature=1.0, stop=[], seed=5)
    other = tinker.ModelInput.from_ints([1, 2, 3])
    crowd = [
        sampler.sample(other, 4, tinker.SamplingParams(max_tokens=20, stop=[])) for _ in range(5)
    ]
    together = sampler.sample(PROMPT, 3, params).result()
    for one in crowd:
        one.result()
    assert [sequence.tokens for sequence in together.sequences] == alone
    assert alone[0] != alone[1]


def test_a_seed_and_its_negative_are_two_seeds(sampler):
    found = {seed: sample(sampler, seed=seed)[0].tokens for seed in (7, -7, 8, -8)}
    assert len({tuple(tokens) for tokens in found.values()}) == 4
    assert sample(sampler, seed=-7)[0].tokens == found[-7]


def test_top_p_counts_among_the_tokens_that_top_k_has_left():
    """Shares of 0.4, 0.3 and 0.3; after top-k 2 they are 4/7 and 3/7, so half of them is the first
    token alone.
    """
    logits = torch.tensor([[0.4, 0.3, 0.3]]).log().expand(200, -1)
    uniforms = torch.arange(200, dtype=torch.float64) / 200
    for top_p, expected in ((0.5, {0}), (0.6, {0, 1}), (1.0, {0, 1})):
        settings = TokenChoiceSettings.from_rows(
            torch.ones(200), torch.full((200,), top_p), torch.full((200,), 2)
        )
        tokens, _ = choose_tokens(logits, uniforms, settings)
        assert set(tokens.tolist()) == expected


def test_temperature_zero_and_top_k_one_are_greedy(sampler):
    greedy = sample(sampler, n=2, temperature=0.0)
    assert greedy[0].tokens == greedy[1].tokens == sample(sampler, top_k=1)[0].tokens


def test_a_small_top_p_leaves_only_the_likeliest(sampler):
    assert sample(sampler, top_p=1e-6)[0].tokens == sample(sampler, temperature=0.0)[0].tokens


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_logprobs_are_those_of_the_scaled_distribution(sampler, temperature):
    """From prompt logprobs at temperature 1 of all 260 continuations, scaled by hand."""
    (one,) = sample(sampler, max_tokens=1, temperature=temperature)
    prompt = PROMPT.to_ints()
    waiting = [
        sampler.compute_logprobs(tinker.ModelInput.from_ints([*prompt, token]))
        for token in range(260)
    ]
    raw = np.array([future.result()[-1] for future in waiting], dtype=np.float64) / temperature
    scaled = raw - np.log(np.exp(raw).sum())
    assert (one.logprobs or [])[0] == pytest.approx(scaled[one.tokens[0]], abs=1e-3)


def test_samples_follow_the_distribution(sampler):
    """The mean logprob of many samples is minus the entropy of the first token's distribution."""
    found = sample(sampler, n=2000, max_tokens=1, seed=1)
    prompt = PROMPT.to_ints()
    waiting = [
        sampler.compute_logprobs(tinker.ModelInput.from_ints([*prompt, token]))
        for token in range(260)
    ]
    logs = np.array([future.result()[-1] for future in waiting], dtype=np.float64)
    entropy = -(np.exp(logs) * logs).sum()
    assert np.mean([one.logprobs[0] for one in found if one.logprobs]) == pytest.approx(
        -entropy, abs=0.05
    )


def test_sampling_logprobs_are_those_of_the_trainer(sampler):
    """What is sampled with a cache has the logprob that one pass over the whole sequence gives."""
    (one,) = sample(sampler, max_tokens=10)
    whole = sampler.compute_logprobs(
        tinker.ModelInput.from_ints([*PROMPT.to_ints(), *one.tokens])
    ).result()
    np.testing.assert_allclose(
        np.array(one.logprobs), np.array(whole[-10:], dtype=np.float64), atol=1e-3
    )


def test_it_stops_at_a_token_which_is_part_of_the_answer(sampler):
    first = sample(sampler, temperature=0.0)[0].tokens
    (one,) = sample(sampler, temperature=0.0, stop=[first[2]])
    assert one.stop_reason == "stop"
    assert one.tokens == first[: first.index(first[2]) + 1]


def test_it_stops_at_a_string_across_tokens(sampler):
    """A byte-level vocabulary spells every word over several tokens."""
    from lachesis.tiny_model.build import build_tokenizer

    free = sample(sampler, n=200, max_tokens=12, seed=11)
    texts = [build_tokenizer().decode(one.tokens) for one in free]
    index = next(
        i
        for i, text in enumerate(texts)
        if text[:8].isascii() and len(text) >= 8 and "<" not in text[:8]
    )
    word = texts[index][3:6]
    found = sample(sampler, n=200, max_tokens=12, seed=11, stop=word)[index]
    assert found.stop_reason == "stop"
    assert build_tokenizer().decode(found.tokens).endswith(word)
    assert len(found.tokens) < 12


def test_prompt_logprobs_come_with_a_sample(sampler):
    params = tinker.SamplingParams(max_tokens=2, stop=[])
    answer = sampler.sample(PROMPT, 2, params, include_prompt_logprobs=True).result()
    assert answer.prompt_logprobs is not None
    assert answer.prompt_logprobs[0] is None
    alone = sampler.compute_logprobs(PROMPT).result()
    np.testing.assert_allclose(answer.prompt_logprobs[1:], alone[1:], atol=1e-4)


@pytest.mark.parametrize(
    ("tokens", "params", "message"),
    [
        ([], {}, "the prompt is empty"),
        ([0] * 512, {}, "the prompt has 512 tokens; the context of the model holds 512"),
        ([99999], {}, "token id outside the vocabulary"),
        ([1], {"temperature": -1.0}, "temperature is -1.0"),
        ([1], {"max_tokens": 0}, "max_tokens is 0"),
    ],
)
def test_a_request_that_cannot_be_served_says_why(sampler, tokens, params, message):
    with pytest.raises(tinker.RequestFailedError, match=message):
        sampler.sample(
            tinker.ModelInput.from_ints(tokens), 1, tinker.SamplingParams(**params)
        ).result()


def test_numbers_beyond_every_tensor_disturb_no_other_request(sampler):
    """`top_k` counts at most the vocabulary, and a stop id outside it is never sampled."""
    huge = tinker.SamplingParams(max_tokens=4, top_k=2**70, stop=[2**70, 2**63])
    prompt = tinker.ModelInput.from_ints([1])
    futures = [
        sampler.sample(prompt, 1, huge),
        sampler.sample(prompt, 1, tinker.SamplingParams(max_tokens=4, stop=[])),
    ]
    for future in futures:
        assert len(future.result().sequences[0].tokens) == 4


@needs_sdk("0.38", "targets of a prompt")
def test_targets_for_a_prompt_of_one_token_are_refused(sampler):
    """The client must not wait for ever, whatever the engine raises while it reads a request."""
    with pytest.raises(tinker.RequestFailedError, match="needs a prompt of at least 2 tokens"):
        sampler.sample(
            tinker.ModelInput.from_ints([1]),
            1,
            tinker.SamplingParams(max_tokens=1),
            target_prompt_logprobs=tinker.TensorData.from_torch(
                torch.zeros((0, 1), dtype=torch.int64)
            ),
        ).result(timeout=30)


def test_a_long_sample_is_cut_at_the_context(sampler):
    answer = sampler.sample(
        tinker.ModelInput.from_ints([1] * 508), 1, tinker.SamplingParams(max_tokens=100, stop=[])
    ).result()
    assert len(answer.sequences[0].tokens) == 4
    assert answer.sequences[0].stop_reason == "length"


async def test_a_cancelled_sample_frees_the_engine(service, engine):
    """Its rows leave the batch, so the next sample need not wait for them."""
    sampler = await call_sdk(service, "create_sampling_client", base_model=engine.model)
    many = tinker.SamplingParams(max_tokens=300, stop=[])
    long = asyncio.create_task(call_sdk(sampler, "sample", PROMPT, 128, many))
    await asyncio.sleep(0.3)
    long.cancel()
    started = time.monotonic()
    few = tinker.SamplingParams(max_tokens=1, stop=[])
    await call_sdk(sampler, "sample", PROMPT, 1, few)
    short = time.monotonic() - started
    whole = time.monotonic()
    await call_sdk(sampler, "sample", PROMPT, 128, many)
    assert short < 0.7 * (time.monotonic() - whole)


@needs_sdk("0.30", "clients that can be closed")
def test_an_ended_session_frees_its_samplers(engine):
    client = tinker.ServiceClient(base_url=engine.url, api_key=engine.token)
    training = wait_for_sdk(client.create_lora_training_client(base_model=engine.model, rank=4))
    sampler_id = wait_for_sdk(training.save_weights_and_get_sampling_client())._sampling_session_id
    headers = {"X-API-Key": engine.token}
    assert (
        httpx.get(f"{engine.url}/api/v1/samplers/{sampler_id}", headers=headers).status_code == 200
    )
    client.close("success").result()
    until = time.monotonic() + 10
    while (
        httpx.get(f"{engine.url}/api/v1/samplers/{sampler_id}", headers=headers).status_code != 404
    ):
        assert time.monotonic() < until
        time.sleep(0.1)
