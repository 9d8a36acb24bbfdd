"""The endpoints that environments sample from, asked by plain HTTP and by clients of Atropos."""

import time

import httpx
import numpy as np
import openai
import pytest
from atroposlib.envs.server_handling.managed_server import ManagedServer
from atroposlib.envs.server_handling.server_baseline import APIServerConfig
from atroposlib.envs.server_handling.sglang_server import SGLangServer
from atroposlib.envs.server_handling.vllm_server import VLLMServer
from transformers import AutoTokenizer

from lachesis.config import run_config as run_config
from tests.inference_server.requests import CHAT, PROMPT, ask
from tests.inference_server.test_parameters import VLLM, greedy_tokens


async def test_health_tells_phase_and_step(server):
    answer = (await ask(server, "/health")).json()
    assert answer["status"] == "ok"
    assert answer["trainer_initialized"] is True
    assert (answer["phase"], answer["step"], answer["total_steps"]) == ("training", 7, 300)
    assert set((await ask(server, "/wandb_info")).json()) == {"group", "project", "url"}


async def test_generate_in_the_dialect_of_vllm(server):
    body = {
        "prompt": {"prompt_token_ids": PROMPT},
        "logprobs": 0,
        "n": 3,
        "max_tokens": 4,
        "temperature": 1.0,
    }
    answer = (await ask(server, "/generate", body)).json()
    assert len(answer["logprobs"]) == len(answer["finish_reasons"]) == 3
    for tokens, logprobs in zip(answer["token_ids"], answer["logprobs"], strict=True):
        assert [list(logprob[0]) for logprob in logprobs] == [[str(token)] for token in tokens]
    assert set(answer["finish_reasons"]) <= {"stop", "length"}
    scored = (await ask(server, "/generate", {**body, "n": 1, "prompt_logprobs": 1})).json()[
        "prompt_logprobs"
    ]
    assert scored[0] is None
    assert [list(one) for one in scored[1:]] == [[str(token)] for token in PROMPT[1:]]


async def test_generate_in_the_dialect_of_sglang(server):
    body = {
        "input_ids": PROMPT,
        "sampling_params": {"n": 1, "max_new_tokens": 4, "temperature": 0.0},
        "return_logprob": True,
    }
    one = (await ask(server, "/generate", body)).json()
    assert {"text", "meta_info"} <= set(one)
    assert all(len(entry) == 3 for entry in one["meta_info"]["output_token_logprobs"])
    body["sampling_params"]["n"] = 2  # type: ignore[index]
    both = (await ask(server, "/generate", body)).json()
    tokens = [[entry[1] for entry in found["meta_info"]["output_token_logprobs"]] for found in both]
    assert (
        tokens[0] == tokens[1] == [entry[1] for entry in one["meta_info"]["output_token_logprobs"]]
    )


async def test_finish_reason_is_true(server):
    """ "length" when the limit cut it, "stop" when it ended by itself."""
    cut = (
        await ask(
            server,
            "/v1/chat/completions",
            {"messages": CHAT, "max_tokens": 1, "n": 8, "temperature": 2.0},
        )
    ).json()
    reasons = {choice["finish_reason"] for choice in cut["choices"]}
    assert "length" in reasons
    greedy = {"prompt": PROMPT, "max_tokens": 6, "temperature": 0.0}
    text = (
        await ask(
            server,
            "/generate",
            {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 6, "temperature": 0}},
        )
    ).json()
    third = text["meta_info"]["output_token_logprobs"][2][1]
    stopped = (await ask(server, "/v1/completions", {**greedy, "stop_token_ids": [third]})).json()
    assert stopped["choices"][0]["finish_reason"] == "stop"
    assert stopped["usage"]["completion_tokens"] <= 3


async def test_logprobs_of_a_text(server):
    answer = (await ask(server, "/logprobs", {"messages": CHAT})).json()
    assert answer["tokens"] == PROMPT
    assert answer["logprobs"][0] is None
    assert all(value < 0 for value in answer["logprobs"][1:])


async def test_the_base_model_stands_beside_the_policy(server):
    """Before any training step both say the same."""
    ours, base = [
        (await ask(server, f"{prefix}/logprobs", {"messages": CHAT})).json()
        for prefix in ("", "/base")
    ]
    np.testing.assert_allclose(ours["logprobs"][1:], base["logprobs"][1:], atol=1e-4)


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/v1/completions", {"prompt": ["a", "b"]}, "one text or one list of token ids"),
        ("/v1/completions", {"prompt": [99999]}, "token id outside the vocabulary"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user"}]},
            "the chat template refuses these messages",
        ),
        (
            "/generate",
            {"input_ids": [1] * 600, "sampling_params": {}},
            "the prompt has 600 tokens; the context of the model holds 512",
        ),
    ],
)
async def test_a_bad_request_says_why(server, path, body, message):
    answer = await ask(server, path, body)
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]


async def test_the_doubled_end_of_turn_is_repaired_before_sampling(server):
    """Both prompts are the same context, so greedy decoding agrees."""
    turn = [*PROMPT, 23, 258]
    plain, doubled = [*turn, 256, 17, 258, 257], [*turn, 258, 256, 17, 258, 257]
    answers = []
    for prompt in (plain, doubled):
        body = {"prompt": {"prompt_token_ids": prompt}, "max_tokens": 5, "temperature": 0.0}
        answers.append((await ask(server, "/generate", body)).json()["logprobs"])
    assert answers[0] == answers[1]


@pytest.mark.parametrize(("kind", "cls"), [("vllm", VLLMServer), ("sglang", SGLangServer)])
async def test_atropos_managed_server_gets_exact_tokens(server, engine, kind, cls):
    """Tokens, masks and logprobs as an environment would send them to the trainer."""
    config = APIServerConfig(
        base_url=f"{server}/v1",
        api_key="x",
        model_name=engine.model,
        server_type=kind,
        health_check=False,
    )
    managed = ManagedServer(cls(config), tokenizer=AutoTokenizer.from_pretrained(engine.model))
    completion = await managed.chat_completion(messages=CHAT, n=3, max_tokens=5, temperature=1.0)
    nodes = managed.get_state()["nodes"]
    assert len(completion.choices) == len(nodes) == 3
    for node in nodes:
        assert node.tokens[: len(PROMPT)] == PROMPT
        assert node.masked_tokens == [-100] * len(PROMPT) + node.tokens[len(PROMPT) :]
        assert len(node.logprobs) == len(node.tokens)
        assert all(value <= 0 for value in node.logprobs[len(PROMPT) :])


async def test_a_client_that_hangs_up_frees_its_sampling(server, engine):
    """The engine notes the cancellation; the next request does not wait for what was given up."""
    body = {"prompt": PROMPT, "n": 128, "max_tokens": 480, "stop_token_ids": [0]}
    async with httpx.AsyncClient(base_url=server, timeout=0.4) as impatient:
        with pytest.raises(httpx.ReadTimeout):
            await impatient.post("/v1/completions", json=body)
    started = time.monotonic()
    answer = await ask(server, "/v1/completions", {"prompt": PROMPT, "max_tokens": 1})
    short_s = time.monotonic() - started
    assert answer.status_code == 200
    started = time.monotonic()
    async with httpx.AsyncClient(base_url=server, timeout=120) as patient:
        assert (await patient.post("/v1/completions", json=body)).status_code == 200
    assert short_s < 0.5 * (time.monotonic() - started)


async def test_logprobs_of_the_sampled_tokens_are_given_as_openai_does(server, engine):
    async with openai.AsyncClient(base_url=f"{server}/v1", api_key="x") as client:
        chat = await client.chat.completions.create(
            model=engine.model,
            messages=CHAT,
            max_completion_tokens=3,
            temperature=0,
            logprobs=True,  # type: ignore[arg-type]
        )
        text = await client.completions.create(
            model=engine.model, prompt=PROMPT, max_tokens=3, temperature=0, logprobs=0
        )
    content = chat.choices[0].logprobs.content  # type: ignore[union-attr]
    assert content is not None
    found = text.choices[0].logprobs
    assert found is not None
    assert [one.logprob for one in content] == found.token_logprobs
    assert [one.token for one in content] == found.tokens
    assert len(content) == chat.usage.completion_tokens  # type: ignore[union-attr]
    assert found.text_offset == [
        0,
        *(sum(map(len, found.tokens[:end])) for end in range(1, len(found.tokens))),
    ]  # type: ignore[index,arg-type]


async def test_special_tokens_are_shown_when_asked_for(server, engine):
    tokenizer = AutoTokenizer.from_pretrained(engine.model)
    long = {"max_tokens": 200, "stop_token_ids": [0]}
    tokens, reason = await greedy_tokens(server, **long)
    assert reason == "length"
    answers = [
        (
            await ask(
                server,
                "/generate",
                {**VLLM, **long, "temperature": 0.0, "skip_special_tokens": skip},
            )
        ).json()["text"][0]
        for skip in (True, False)
    ]
    assert answers == [tokenizer.decode(tokens, skip_special_tokens=skip) for skip in (True, False)]
    assert "<|assistant|>" in answers[1]
