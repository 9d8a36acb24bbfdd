"""The endpoints that environments sample from, on a real engine, asked by plain HTTP and by
Atropos' own clients.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

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
from lachesis.supervision.process import reserve_free_ports
from lachesis.trainer.__main__ import bind_inference_socket, serve_in_background
from lachesis.trainer.inference_server import create_app
from lachesis.trainer.policy import Policy
from lachesis.trainer.state import TrainerState
from tests.patience import deadline

CHAT = [{"role": "user", "content": "3+4="}]
PROMPT = [256, 18, 10, 19, 28, 258, 257]


@pytest.fixture
async def server(engine: Any, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[str]:
    """The application on a real port; its address."""
    monkeypatch.setenv("TINKER_BASE_URL", engine.url)
    monkeypatch.setenv("TINKER_API_KEY", engine.token)
    url = f"http://127.0.0.1:{reserve_free_ports(1)[0]}"
    edits = {"openai": {"base_url": f"{url}/v1"}, "env": {"max_token_length": 16}}
    config = run_config.resolve_run_config("arithmetic", "embedded", edits, model=engine.model)
    policy = await Policy.create(config, resume_from=None)
    await policy.publish()
    app = create_app(
        policy, AutoTokenizer.from_pretrained(engine.model), config, TrainerState("training", 7)
    )
    with bind_inference_socket(config) as sock:
        async with serve_in_background(app, sock):
            await until_answers(f"{url}/health")
            yield url
    await policy.close("success")


async def until_answers(url: str) -> None:
    until = deadline(20)
    async with httpx.AsyncClient() as client:
        while True:
            try:
                await client.get(url)
                return
            except httpx.HTTPError:
                assert time.monotonic() < until, f"{url} does not answer"
                await asyncio.sleep(0.05)


async def ask(url: str, path: str, body: Any = None) -> httpx.Response:
    async with httpx.AsyncClient(base_url=url, timeout=30) as client:
        return await (client.get(path) if body is None else client.post(path, json=body))


async def test_health_tells_phase_and_step(server: str) -> None:
    answer = (await ask(server, "/health")).json()
    assert answer["status"] == "ok"
    assert answer["trainer_initialized"] is True
    assert (answer["phase"], answer["step"], answer["total_steps"]) == ("training", 7, 300)
    assert set((await ask(server, "/wandb_info")).json()) == {"group", "project", "url"}


async def test_generate_in_the_dialect_of_vllm(server: str) -> None:
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


async def test_generate_in_the_dialect_of_sglang(server: str) -> None:
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


async def test_finish_reason_is_true(server: str) -> None:
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


async def test_logprobs_of_a_text(server: str) -> None:
    answer = (await ask(server, "/logprobs", {"messages": CHAT})).json()
    assert answer["tokens"] == PROMPT
    assert answer["logprobs"][0] is None
    assert all(value < 0 for value in answer["logprobs"][1:])


async def test_the_base_model_stands_beside_the_policy(server: str) -> None:
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
async def test_a_bad_request_says_why(server: str, path: str, body: Any, message: str) -> None:
    answer = await ask(server, path, body)
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]


async def test_token_ids_to_stop_at_may_stand_in_both_places(server: str) -> None:
    greedy = {"prompt": PROMPT, "max_tokens": 6, "temperature": 0.0}
    plain = (
        await ask(
            server,
            "/generate",
            {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 6, "temperature": 0}},
        )
    ).json()
    third = plain["meta_info"]["output_token_logprobs"][2][1]
    for stops in (
        {"stop": [third], "stop_token_ids": [511]},
        {"stop": [511], "stop_token_ids": [third]},
    ):
        answer = (await ask(server, "/v1/completions", {**greedy, **stops})).json()
        assert answer["choices"][0]["finish_reason"] == "stop"


async def test_the_doubled_end_of_turn_is_repaired_before_sampling(server: str) -> None:
    """Both prompts are the same context, so greedy decoding agrees."""
    turn = [*PROMPT, 23, 258]
    plain, doubled = [*turn, 256, 17, 258, 257], [*turn, 258, 256, 17, 258, 257]
    answers = []
    for prompt in (plain, doubled):
        body = {"prompt": {"prompt_token_ids": prompt}, "max_tokens": 5, "temperature": 0.0}
        answers.append((await ask(server, "/generate", body)).json()["logprobs"])
    assert answers[0] == answers[1]


@pytest.mark.parametrize(("kind", "cls"), [("vllm", VLLMServer), ("sglang", SGLangServer)])
async def test_atropos_managed_server_gets_exact_tokens(
    server: str, engine: Any, kind: str, cls: Any
) -> None:
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


async def test_a_client_that_hangs_up_frees_its_sampling(server: str, engine: Any) -> None:
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


async def greedy_tokens(url: str, **settings: Any) -> tuple[list[int], str]:
    """The most likely answer to PROMPT, and why it ended."""
    body = {
        "prompt": {"prompt_token_ids": PROMPT},
        "max_tokens": 12,
        "temperature": 0.0,
        **settings,
    }
    answer = await ask(url, "/generate", body)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    assert len(found["token_ids"][0]) == len(found["logprobs"][0])
    return found["token_ids"][0], found["finish_reasons"][0]


async def test_stop_texts_and_stop_ids_end_an_answer_together(server: str, engine: Any) -> None:
    """Whichever comes first; the other one used to be dropped."""
    tokenizer = AutoTokenizer.from_pretrained(engine.model)
    whole, _ = await greedy_tokens(server, stop_token_ids=[0])
    first = {token: index for index, token in reversed(list(enumerate(whole)))}
    (early, at), *_, (late, later) = [
        (t, i) for t, i in sorted(first.items(), key=lambda pair: pair[1]) if t < 256
    ]
    assert at < later, "the answer has two tokens that can be told apart"
    by_text, reason = await greedy_tokens(
        server, stop=[tokenizer.decode([early])], stop_token_ids=[late]
    )
    assert (by_text, reason) == (whole[: at + 1], "stop")
    by_id, reason = await greedy_tokens(
        server, stop=[tokenizer.decode([late])], stop_token_ids=[early]
    )
    assert (by_id, reason) == (whole[: at + 1], "stop")
    neither, reason = await greedy_tokens(
        server, stop=["never said"], stop_token_ids=[255], max_tokens=at + 1
    )
    assert (neither, reason) == (whole[: at + 1], "length")
    mixed, _ = await greedy_tokens(server, stop=[early], stop_token_ids=[late])
    assert mixed == whole[: at + 1]


CHATS = {"messages": CHAT, "max_tokens": 2}
TEXTS = {"prompt": PROMPT, "max_tokens": 2}
VLLM = {"prompt": {"prompt_token_ids": PROMPT}, "max_tokens": 2}


def sglang(**settings: Any) -> dict[str, Any]:
    return {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 2, **settings}}


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        (
            "/v1/chat/completions",
            {**CHATS, "max_tokens": 0},
            "max_tokens is 0; allowed: at least 1",
        ),
        (
            "/v1/chat/completions",
            {**CHATS, "max_completion_tokens": 0},
            "max_completion_tokens is 0; allowed: one of them",
        ),
        ("/v1/completions", {**TEXTS, "max_tokens": -1}, "max_tokens is -1; allowed: at least 1"),
        ("/generate", {**VLLM, "max_tokens": 0}, "max_tokens is 0; allowed: at least 1"),
        ("/generate", sglang(max_new_tokens=0), "max_tokens is 0; allowed: at least 1"),
        (
            "/v1/chat/completions",
            {**CHATS, "stream": True},
            "stream is True, which is not supported here; allowed: false",
        ),
        ("/v1/completions", {**TEXTS, "stream": True}, "stream is True"),
        ("/generate", {**sglang(), "stream": True}, "stream is True"),
        ("/v1/chat/completions", {**CHATS, "presence_penalty": 0.5}, "presence_penalty is 0.5"),
        ("/v1/completions", {**TEXTS, "frequency_penalty": -1}, "frequency_penalty is -1"),
        ("/v1/completions", {**TEXTS, "logit_bias": {"5": -100}}, "logit_bias is {'5': -100}"),
        ("/v1/completions", {**TEXTS, "echo": True}, "echo is True"),
        ("/v1/completions", {**TEXTS, "best_of": 4}, "best_of is 4"),
        (
            "/v1/completions",
            {**TEXTS, "logprobs": 5},
            "logprobs is 5, which is not supported here; allowed: 0 or null",
        ),
        (
            "/v1/chat/completions",
            {**CHATS, "logprobs": True, "top_logprobs": 3},
            "top_logprobs is 3",
        ),
        (
            "/v1/chat/completions",
            {**CHATS, "response_format": {"type": "json_object"}},
            "response_format is",
        ),
        ("/v1/chat/completions", {**CHATS, "tools": [{"type": "function"}]}, "tools is"),
        (
            "/v1/chat/completions",
            {**CHATS, "reasoning": {"effort": "low"}},
            "reasoning is {'effort': 'low'}",
        ),
        (
            "/generate",
            {**VLLM, "min_p": 0.1},
            "min_p is 0.1, which is not supported here; allowed: 0 or null",
        ),
        ("/generate", {**VLLM, "logprobs": 8}, "logprobs is 8"),
        ("/generate", {**VLLM, "prompt_logprobs": 8}, "prompt_logprobs is 8"),
        (
            "/generate",
            {**VLLM, "extra_body": {"repetition_penalty": 1.2}},
            "repetition_penalty is 1.2",
        ),
        ("/generate", {**VLLM, "sampling_params": {"temperature": 0}}, "sampling_params is"),
        ("/generate", sglang(repetition_penalty=1.1), "repetition_penalty is 1.1"),
        ("/generate", sglang(regex="[0-9]+"), "regex is not a parameter of this request"),
        (
            "/generate",
            {**sglang(), "temperature": 0},
            "temperature is not a parameter of this request",
        ),
        (
            "/generate",
            {**sglang(), "prompt_logprobs": 1},
            "prompt_logprobs is not a parameter of this request",
        ),
        (
            "/v1/chat/completions",
            {**CHATS, "temprature": 0.2},
            "temprature is not a parameter of this request",
        ),
        (
            "/logprobs",
            {"prompt": "1+1=", "add_generation_prompt": False},
            "add_generation_prompt is False, which is not supported",
        ),
    ],
)
async def test_a_parameter_that_would_be_ignored_is_refused(
    server: str, path: str, body: Any, message: str
) -> None:
    answer = await ask(server, path, body)
    assert answer.status_code == 400, answer.text
    assert message in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (
            "/v1/chat/completions",
            {
                **CHATS, "model": "m", "stream": False, "presence_penalty": 0,
                "frequency_penalty": 0.0, "n": 1, "top_p": 1,
                "logprobs": False, "tools": None, "tool_choice": "none", "user": "me", "stop": None,
                "logit_bias": {},
                "response_format": {"type": "text"}, "max_completion_tokens": 2,
                "metadata": {"a": "b"}, "store": False,
                "reasoning": {"enabled": True}, "parallel_tool_calls": True, "stream_options": None,
                "seed": 7,
            },
        ),
        ("/v1/completions", {**TEXTS, "best_of": 1, "echo": False, "suffix": None,
                             "logprobs": None, "stop": []}),
        ("/generate", {**VLLM, "logprobs": 0, "min_p": 0.0, "repetition_penalty": 1.0,
                       "skip_special_tokens": True}),
        ("/generate", {**VLLM, "extra_body": {"reasoning": {"enabled": True}}, "ignore_eos": False,
                       "top_k": 0}),
        (
            "/generate",
            {
                **sglang(min_new_tokens=0, stop=None, stop_token_ids=None, ignore_eos=False,
                         skip_special_tokens=True),
                "return_logprob": True, "return_text_in_logprobs": False, "stream": False,
                    "top_logprobs_num": 0,
                "logprob_start_len": -1,
            },
        ),
    ],
)  # fmt: skip
async def test_what_clients_send_to_leave_a_parameter_off_is_accepted(
    server: str, path: str, body: Any
) -> None:
    answer = await ask(server, path, body)
    assert answer.status_code == 200, answer.text


async def test_logprobs_of_the_sampled_tokens_are_given_as_openai_does(
    server: str, engine: Any
) -> None:
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


async def test_special_tokens_are_shown_when_asked_for(server: str, engine: Any) -> None:
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
