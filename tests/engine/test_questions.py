"""What a request may ask beside samples, through the SDK, against one pass of the model in this
process.
"""

from pathlib import Path

import httpx
import numpy as np
import pytest
import tinker
import torch
from transformers import AutoModelForCausalLM

from lachesis.base.tinker_client import wait_for_sdk
from tests.harness.sdk_versions import needs_sdk

PROMPT = [256, 18, 10, 19, 28, 258, 257]
ONE = tinker.SamplingParams(max_tokens=1, stop=[])


@pytest.fixture(scope="module")
def sampler(service, engine):
    return wait_for_sdk(service.create_sampling_client(base_model=engine.model))


@pytest.fixture(scope="module")
def expected(engine):
    """Log-probabilities (P - 1, V) before each prompt token but the first."""
    module = AutoModelForCausalLM.from_pretrained(engine.model, dtype=torch.float32)
    with torch.no_grad():
        return torch.log_softmax(module(torch.tensor([PROMPT])).logits[0, :-1], -1).numpy()


def ask(sampler, params=ONE, **asked):
    return sampler.sample(tinker.ModelInput.from_ints(PROMPT), 1, params, **asked).result()


def test_the_likeliest_tokens_of_the_prompt(sampler, expected):
    found = ask(sampler, include_prompt_logprobs=True, topk_prompt_logprobs=3).topk_prompt_logprobs
    assert found is not None
    assert found[0] is None
    for row, values in zip(found[1:], expected, strict=True):
        assert row is not None
        best = np.argsort(-values)[:3]
        assert [token for token, _ in row] == best.tolist()
        np.testing.assert_allclose([value for _, value in row], values[best], atol=1e-4)


@needs_sdk("0.38", "parts of a prompt")
def test_only_the_end_of_the_prompt(sampler, expected):
    answer = ask(
        sampler, include_prompt_logprobs=True, topk_prompt_logprobs=2, prompt_logprobs_last_n=2
    )
    assert answer.prompt_logprobs is not None
    assert answer.prompt_logprobs[:-2] == [None] * 5
    np.testing.assert_allclose(
        answer.prompt_logprobs[-2:], [expected[row, PROMPT[row + 1]] for row in (4, 5)], atol=1e-4
    )
    assert answer.topk_prompt_logprobs is not None
    assert [row is None for row in answer.topk_prompt_logprobs] == [True] * 5 + [False] * 2


@needs_sdk("0.38", "targets of a prompt")
@pytest.mark.parametrize("sparse", [False, True])
def test_tokens_that_the_client_names(sampler, expected, sparse):
    ids = torch.full((6, 2), -1, dtype=torch.int64)
    ids[2, 0], ids[5, 1] = 17, 100
    target = (
        tinker.TensorData.from_torch_sparse(ids, pad_value=-1)
        if sparse
        else tinker.TensorData.from_torch(ids)
    )
    answer = ask(sampler, target_prompt_logprobs=target).target_prompt_logprobs
    assert answer is not None
    found = answer.to_torch().numpy()
    assert found.shape == (6, 2)
    np.testing.assert_allclose(
        [found[2, 0], found[5, 1]], [expected[2, 17], expected[5, 100]], atol=1e-4
    )
    assert np.count_nonzero(found) == 2


@needs_sdk("0.38", "alternatives")
def test_alternatives_are_drawn_from_the_distribution(sampler, expected):
    """At temperature 0 all are the likeliest; at 1 their mean logprob is minus the entropy."""
    greedy = ask(
        sampler, tinker.SamplingParams(max_tokens=1, temperature=0.0), prompt_alt_tokens_k=2
    ).prompt_alt_tokens
    assert greedy is not None
    assert greedy.tokens.to_torch().tolist() == [[best, best] for best in expected.argmax(1)]
    many = ask(
        sampler, tinker.SamplingParams(max_tokens=1, seed=3), prompt_alt_tokens_k=1000
    ).prompt_alt_tokens
    assert many is not None
    tokens, logprobs = many.tokens.to_torch().numpy(), many.logprobs.to_torch().numpy()
    np.testing.assert_allclose(logprobs, np.take_along_axis(expected, tokens, 1), atol=1e-4)
    entropy = -(np.exp(expected) * expected).sum(1)
    np.testing.assert_allclose(logprobs.mean(1), -entropy, atol=0.15)


@needs_sdk("0.38", "likeliest sampled tokens")
def test_the_likeliest_tokens_of_each_sampled_position(sampler):
    params = tinker.SamplingParams(max_tokens=5, stop=[], temperature=0.0)
    (one,) = ask(sampler, params, topk_sample_logprobs=4).sequences
    assert one.topk_logprobs is not None
    assert [row[0][0] for row in one.topk_logprobs if row] == one.tokens
    np.testing.assert_allclose(
        [row[0][1] for row in one.topk_logprobs if row], one.logprobs or [], atol=1e-5
    )
    assert all(row is not None and len(row) == 4 for row in one.topk_logprobs)


def test_different_adapters_are_sampled_in_one_batch(service, engine):
    """Each sample has the log-probability that its own weights give it."""
    samplers = []
    for seed in (1, 2):
        client = wait_for_sdk(
            service.create_lora_training_client(base_model=engine.model, rank=8, seed=seed)
        )
        tokens = np.arange(8) + seed
        inputs = {"target_tokens": tokens, "weights": np.ones(8, np.float32)}
        data = [
            tinker.Datum(
                model_input=tinker.ModelInput.from_ints(tokens.tolist()), loss_fn_inputs=inputs
            )
        ]
        client.forward_backward(data, "cross_entropy").result()
        client.optim_step(tinker.AdamParams(learning_rate=0.05)).result()
        samplers.append(wait_for_sdk(client.save_weights_and_get_sampling_client()))
    samplers.append(wait_for_sdk(service.create_sampling_client(base_model=engine.model)))
    prompt, params = (
        tinker.ModelInput.from_ints(PROMPT),
        tinker.SamplingParams(max_tokens=30, stop=[]),
    )
    waiting = [
        (sampler, sampler.sample(prompt, 2, params)) for _ in range(3) for sampler in samplers
    ]
    for one, future in waiting:
        for sequence in future.result().sequences:
            whole = one.compute_logprobs(
                tinker.ModelInput.from_ints([*PROMPT, *sequence.tokens])
            ).result()
            np.testing.assert_allclose(
                sequence.logprobs or [], np.array(whole[-30:], np.float64), atol=1e-3
            )


def test_a_sequence_id_that_comes_late_is_refused_and_one_that_is_left_out_is_not(engine):
    with httpx.Client(
        base_url=f"{engine.url}/api/v1",
        headers={"X-API-Key": engine.token},
        trust_env=False,
        timeout=60,
    ) as client:

        def post(path, **body):
            answer = client.post(path, json=body)
            assert answer.status_code == 200, answer.text
            return dict(answer.json())

        def result(submitted):
            return post("/retrieve_future", request_id=submitted["request_id"])

        session = post("/create_session", sdk_version="0.38.0")["session_id"]
        made = post(
            "/create_model",
            session_id=session,
            model_seq_id=0,
            base_model=engine.model,
            lora_config={"rank": 4},
        )
        model = result(made)["model_id"]
        step = {"model_id": model, "adam_params": {"learning_rate": 0.1}}
        first = post("/optim_step", seq_id=1, **step)
        assert "metrics" in result(first)
        assert post("/optim_step", seq_id=1, **step)["request_id"] == first["request_id"], (
            "sent again: the same request"
        )
        assert "metrics" in result(post("/optim_step", seq_id=5, **step)), "a hole is never filled"
        late = result(post("/optim_step", seq_id=3, **step))
        assert (late["category"], "sequence id 3 came after that with 5" in late["error"]) == (
            "user",
            True,
        )
        assert result(post("/unload_model", model_id=model))["model_id"] == model
        assert "there is no model" in result(post("/optim_step", seq_id=6, **step))["error"]
        assert client.post("/create_session", json={"sdk_version": "0.26.2"}).status_code == 400
        refused = client.post("/client/config", json={"sdk_version": "0.24.0"})
        assert (refused.status_code, "0.27 or newer" in refused.text) == (400, True)
        client.post(f"/sessions/{session}/finish", json={})


@needs_sdk("0.38", "numbers that are not finite")
@pytest.mark.parametrize(
    ("adam", "message"),
    [
        ({"learning_rate": float("nan")}, "adam_params.learning_rate is not finite"),
        (
            {"learning_rate": -1.0},
            "adam_params.learning_rate is -1.0; allowed: a number, finite and at least 0",
        ),
        ({"beta2": 1.0}, "adam_params.beta2 is 1.0; allowed: a number, at least 0 and below 1"),
    ],
)
def test_numbers_that_would_ruin_an_adapter_are_refused(training, adam, message):
    with pytest.raises(tinker.RequestFailedError, match=message):
        training.optim_step(tinker.AdamParams(**adam)).result()


@pytest.mark.parametrize("name", ["advantages", "logprobs"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_tensors_that_are_not_finite_are_refused(training, name, value):
    inputs = {
        "target_tokens": np.array([2, 3]),
        "logprobs": np.zeros(2, np.float32),
        "advantages": np.ones(2, np.float32),
    }
    inputs[name] = np.array([0.5, value], np.float32)
    datum = tinker.Datum(model_input=tinker.ModelInput.from_ints([1, 2]), loss_fn_inputs=inputs)
    with pytest.raises(
        tinker.RequestFailedError, match=f"datum 0: {name} has a value that is not finite"
    ):
        training.forward_backward([datum], "ppo").result()


def test_an_impossible_rank_is_refused(service, engine):
    with pytest.raises(tinker.RequestFailedError, match="LoRA rank is 513; allowed: 1 to 512"):
        wait_for_sdk(service.create_lora_training_client(base_model=engine.model, rank=513))


@needs_sdk("0.38", "sparse targets")
def test_one_client_may_ask_for_more_than_fits(start_engine, random_model):
    """Sixty requests of sixteen samples of different lengths; all are answered, and the engine does
    not grow.
    """
    engine = start_engine(random_model)
    with tinker.ServiceClient(base_url=engine.url, api_key=engine.token) as service:
        sampler = wait_for_sdk(service.create_sampling_client(base_model=random_model))
        sizes = []
        for _ in range(3):
            waiting = [
                sampler.sample(
                    tinker.ModelInput.from_ints([1 + n] * (1 + n)),
                    16,
                    tinker.SamplingParams(max_tokens=4 + n, stop=[]),
                )
                for n in range(60)
            ]
            for n, future in enumerate(waiting):
                assert [len(sequence.tokens) for sequence in future.result().sequences] == [
                    4 + n
                ] * 16
            status = Path(f"/proc/{engine.process.pid}/status").read_text()
            sizes.append(int(status.split("VmRSS:")[1].split()[0]))
    assert sizes[2] < 1.05 * sizes[1]
