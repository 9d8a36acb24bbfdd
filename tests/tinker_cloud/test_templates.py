"""Chat templates and thinking: the model is shown what was asked for, and its answer is scored."""

import json
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route
from transformers import PreTrainedTokenizerBase

from lachesis.base.errors import ConfigError, RLEnvironmentError
from lachesis.cli.main import main
from lachesis.config import run_config
from lachesis.environment_process.chat_template_settings import install_template_settings
from lachesis.environment_toolkit.sampling import encode_first_prompt, find_answer
from lachesis.inference_server.sampling import Inference
from lachesis.inference_server.serving import load_tokenizer
from lachesis.inference_server.token_usage import Usage
from tests.harness.processes import serve
from tests.tinker_cloud.stand_ins import STAND_INS, build_tokenizer, ensure_stand_in

MESSAGES = [{"role": "user", "content": "2 3 make 5:"}]
QWEN, INSTRUCT, LLAMA, GPT_OSS = STAND_INS


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The folder of each stand-in, so that nothing asks a Hub."""
    hf_home = tmp_path_factory.mktemp("hf")
    return {name: str(ensure_stand_in(name, hf_home)) for name in STAND_INS}


@pytest.fixture(autouse=True)
def restored_class(monkeypatch):
    """Tests patch the class as an environment's process does."""
    monkeypatch.setattr(
        PreTrainedTokenizerBase, "apply_chat_template", PreTrainedTokenizerBase.apply_chat_template
    )


def make_config(model, **tinker):
    return run_config.resolve_run_config("countdown", "tinker", {"tinker": tinker}, model=model)


def make_inference(config):
    tokenizer = load_tokenizer(config)
    return Inference(None, tokenizer, config, Usage(), is_base=False)  # type: ignore[arg-type]


SETTINGS: list[tuple[str, dict[str, Any], str]] = [
    (QWEN, {}, "assistant\n"),
    (QWEN, {"thinking": "on"}, "assistant\n"),
    (QWEN, {"thinking": "off"}, "<think>\n\n</think>\n\n"),
    (INSTRUCT, {"thinking": "off"}, "assistant\n"),
    (LLAMA, {}, "<|end_header_id|>\n\n"),
    (GPT_OSS, {"chat_template_kwargs": {"reasoning_effort": "high"}}, "<|start|>assistant"),
]


@pytest.mark.parametrize(("model", "tinker", "end"), SETTINGS)
def test_environment_and_trainer_show_the_same_tokens(folders, model, tinker, end):
    trainers_tokens = make_inference(make_config(folders[model], **tinker)).encode_chat(MESSAGES)
    settings = {name: tinker.get(name) for name in ("thinking", "chat_template_kwargs")}
    install_template_settings(settings, None)
    tokenizer = build_tokenizer(STAND_INS[model])
    assert encode_first_prompt(tokenizer, MESSAGES) == trainers_tokens
    text = tokenizer.decode(trainers_tokens)
    assert text.endswith(end)
    if "chat_template_kwargs" in tinker:
        assert "Reasoning: high" in text


@pytest.mark.parametrize(("model", "thinking"), [(GPT_OSS, "off"), (INSTRUCT, "on")])
def test_what_a_model_cannot_do_is_refused(folders, model, thinking):
    with pytest.raises(ConfigError, match="cannot do that: its chat template cannot switch"):
        load_tokenizer(make_config(folders[model], thinking=thinking))


def test_a_trainer_that_shows_other_tokens_is_found_at_the_first_prompt():
    requests: list[Any] = []

    async def tokenize(request):
        requests.append((request.headers["authorization"], await request.json()))
        return JSONResponse({"tokens": theirs})

    tokenizer = build_tokenizer(STAND_INS[QWEN])
    theirs = tokenizer.apply_chat_template(
        MESSAGES, add_generation_prompt=True, return_dict=False, enable_thinking=False
    )
    with serve(Starlette(routes=[Route("/tokenize", tokenize, methods=["POST"])])) as url:
        install_template_settings({}, (url, "secret"))
        with pytest.raises(RLEnvironmentError, match="into other tokens, from position"):
            encode_first_prompt(tokenizer, MESSAGES)
        assert encode_first_prompt(tokenizer, MESSAGES), "it is compared once"
    assert requests == [("Bearer secret", {"messages": MESSAGES})]


@pytest.mark.parametrize(
    ("model", "thinking", "sampled", "answer"),
    [
        (QWEN, None, "<think>\nok\n</think>\n\n2+3<|im_end|>", "2+3"),
        (QWEN, None, "<think>\nok, so 2+", ""),
        (QWEN, "off", "2+3<|im_end|>", None),
        (INSTRUCT, None, "2+3<|im_end|>", None),
        (
            GPT_OSS,
            None,
            "<|channel|>analysis<|message|>ok<|end|><|start|>assistant<|channel|>final"
            "<|message|>2+3<|return|>",
            "2+3",
        ),
        (GPT_OSS, None, "<|channel|>analysis<|message|>so 2+", ""),
        (LLAMA, None, "2+3<|eot_id|>", None),
    ],
)
def test_an_answer_is_scored_without_the_thought_before_it(model, thinking, sampled, answer):
    tokenizer = build_tokenizer(STAND_INS[model])
    install_template_settings({"thinking": thinking}, None)
    prompt = encode_first_prompt(tokenizer, MESSAGES)
    tokens = tokenizer.encode(sampled, add_special_tokens=False)
    assert find_answer(tokenizer, prompt, tokens) == answer


def test_a_thought_that_the_template_has_begun_may_stay_open():
    tokenizer = build_tokenizer(STAND_INS[QWEN])
    prompt = tokenizer.encode("<|im_start|>assistant\n<think>\n")
    tokens = tokenizer.encode("so 2+3 is")
    assert find_answer(tokenizer, prompt, tokens) == ""


def test_named_tokens_end_an_answer_with_the_models_own(folders):
    inference = make_inference(make_config(folders[QWEN], stop_tokens=["<|endoftext|>"]))
    tokenizer = build_tokenizer(STAND_INS[QWEN])
    ids = [tokenizer.convert_tokens_to_ids(text) for text in ("<|im_end|>", "<|endoftext|>")]
    assert inference.own_stop_ids == ids
    assert make_inference(make_config(folders[QWEN])).own_stop_ids == []
    with pytest.raises(ConfigError, match="allowed: texts of one token each"):
        make_inference(make_config(folders[QWEN], stop_tokens=["two words"]))


def test_the_exact_prompt_is_shown_without_sampling(folders, capsys):
    words = ["test", "countdown", "--show-prompt", "--json", "--model"]
    assert main([*words, folders[QWEN], "--set", "thinking=off"]) == 0
    prompt = json.loads(capsys.readouterr().out)["prompt"]
    tokenizer = build_tokenizer(STAND_INS[QWEN])
    assert tokenizer.decode(prompt["tokens"]) == prompt["text"]
    assert prompt["text"].startswith("<|im_start|>user\n")
    assert prompt["text"].endswith("<think>\n\n</think>\n\n")
    assert main([*words, folders[GPT_OSS], "--set", "thinking=off"]) == 1
    assert "cannot do that" in json.loads(capsys.readouterr().out)["error"]
