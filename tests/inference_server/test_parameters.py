"""Sampling parameters in the dialects of OpenAI, vLLM and SGLang: obeyed, or refused by name."""

import pytest
from transformers import AutoTokenizer

from lachesis.config import run_config as run_config
from tests.inference_server.requests import CHAT, PROMPT, ask


async def test_token_ids_to_stop_at_may_stand_in_both_places(server):
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


async def greedy_tokens(url, **settings):
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


async def test_stop_texts_and_stop_ids_end_an_answer_together(server, engine):
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


def sglang(**settings):
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
async def test_a_parameter_that_would_be_ignored_is_refused(server, path, body, message):
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
async def test_what_clients_send_to_leave_a_parameter_off_is_accepted(server, path, body):
    answer = await ask(server, path, body)
    assert answer.status_code == 200, answer.text
