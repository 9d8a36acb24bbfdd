"""Several turns: the ids are those that were sampled, whatever the template does with text; tools;
what ends a conversation.
"""

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from lachesis.environment import Chat, ConversationEnv, Invalid, Item
from lachesis.environment_catalog import lookup
from lachesis.environment_process import model_free_check
from lachesis.environment_toolkit.rollout import is_solution
from lachesis.environment_toolkit.sampling import CONVERSATION_TOO_LONG
from lachesis.environment_toolkit.tool_calls import (
    MalformedCall,
    ToolCall,
    ToolDefinition,
    describe_tools,
    parse_tool_calls,
)
from tests.environment_toolkit.conftest import LOGPROB, without_place

QWEN_LIKE = (
    "{% for m in messages %}<|user|>{{ m['role'] }}\n{% if m['role'] == 'assistant' %}"
    "{{ m['content'].split('</think>')[-1].strip() if not loop.last else m['content'] }}"
    "{% else %}{{ m['content'] }}{% endif %}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|user|>assistant\n{% endif %}"
)
"""It takes the thoughts out of earlier answers and strips them, as Qwen's does."""


class Echo(ConversationEnv):
    """Asks twice; worth 1 when the second answer is `yes`."""

    name = "echo"

    def load_dataset(self) -> list[Item]:
        return [{"question": f"one {number}?"} for number in range(10)]

    async def play(self, item: Item, chat: Chat) -> Any:
        await chat.answer()
        second = await chat.answer("two?")
        if second == "away":
            raise Invalid("the judge is away")
        if second == "bug":
            raise ValueError("a bug")
        if second == "hangs":
            await asyncio.sleep(60)
        if second == "late":
            raise TimeoutError("the judge")
        return float(second == "yes")


async def play(make, generator, answers, template=None, **fields):
    env = make(Echo, group_size=1, **fields)
    if template:
        env.tokenizer.chat_template = template
    await env.setup()
    said = iter(answers)
    generator.say = lambda prompt, n: [next(said)]
    (rollout,) = await env.sample_rollouts({"question": "one?"}, 1)
    return env, rollout


async def test_both_answers_are_trained_on_and_no_turn_ends_twice(made, generator):
    env, rollout = await play(made, generator, ["no", "yes"])
    text = "<|user|>one?<|end|><|assistant|>no<|end|><|user|>two?<|end|><|assistant|>yes<|end|>"
    assert env.tokenizer.decode(rollout.tokens) == text
    assert (
        env.tokenizer.decode([token for token in rollout.masks if token != -100])
        == "no<|end|>yes<|end|>"
    )
    assert [
        value for value, mask in zip(rollout.logprobs, rollout.masks, strict=True) if mask != -100
    ] == [LOGPROB] * 7
    assert (rollout.outcome.reward, rollout.answer, rollout.sampled_tokens) == (1.0, "yes", 7)
    assert generator.bodies[1]["prompt"]["prompt_token_ids"] == rollout.tokens[:-4], (
        "sampled after what is trained on"
    )


async def test_an_answer_that_was_cut_is_ended_by_the_template(made, generator):
    env, rollout = await play(made, generator, ["no…", "yes"])
    text = "<|user|>one?<|end|><|assistant|>no<|end|><|user|>two?<|end|><|assistant|>yes<|end|>"
    assert env.tokenizer.decode(rollout.tokens) == text
    assert (
        env.tokenizer.decode([token for token in rollout.masks if token != -100]) == "noyes<|end|>"
    )


async def test_a_template_that_rewrites_earlier_turns_changes_nothing(made, generator):
    env, rollout = await play(made, generator, ["<think>hm</think> no ", "yes"], QWEN_LIKE)
    first = "<|user|>user\none?<|end|>\n<|user|>assistant\n<think>hm</think> no <|end|>"
    assert (
        env.tokenizer.decode(rollout.tokens)
        == f"{first}\n<|user|>user\ntwo?<|end|>\n<|user|>assistant\nyes<|end|>"
    )


@pytest.mark.parametrize(
    ("answers", "reward", "reason"),
    [
        (["a", "b"], 0.0, None),
        (["a", "away"], None, "the judge is away"),
        (["a", "bug"], None, "play() raised: ValueError somewhere: a bug"),
        (["a", "late"], None, "play() raised: TimeoutError somewhere: the judge"),
        (["a", "hangs"], None, "play(), without what was sampled, was not done after 0.4 s"),
        (["x" * 60 + "…", "yes"], 0.0, CONVERSATION_TOO_LONG),
    ],
)
async def test_what_ends_a_conversation_decides_its_outcome(
    made, generator, answers, reward, reason
):
    _, rollout = await play(made, generator, answers, max_token_length=70, verifier_timeout_s=0.4)
    assert (rollout.outcome.reward, without_place(rollout.outcome.reason)) == (reward, reason)
    assert len(rollout.tokens) == len(rollout.masks) == len(rollout.logprobs) < 70


async def test_a_server_that_fails_makes_one_conversation_invalid(made, generator):
    """The one whose first answer was `b`; asking again does not help it."""
    env = made(Echo, group_size=3)
    await env.setup()
    first = iter("abc")
    generator.say = lambda prompt, n: (
        [next(first)] if "two?" not in prompt else ["!500" if ">b<" in prompt else "yes"]
    )
    group, _ = await env.collect_trajectories({"question": "one?"})
    assert group["scores"] == [1.0, 1.0, 1.0], "an invalid one takes the mean of the others"
    reasons = [override["invalid"] for override in group["overrides"] if override]
    assert len(reasons) == 1
    assert reasons[0].startswith("the server failed")
    generator.say = lambda prompt, n: ["!500"]
    with pytest.raises(Invalid, match="all 3 rollouts are invalid: the server failed"):
        await env.collect_trajectories({"question": "one?"})


async def test_slow_samples_are_no_hang(made, generator):
    env = made(Echo, verifier_timeout_s=0.3)
    await env.setup()
    generator.say = lambda prompt, n: [time.sleep(0.3) or "yes"]
    (rollout,) = await env.sample_rollouts({"question": "one?"}, 1)
    assert rollout.outcome.reward == 1.0


async def test_a_conversation_offers_no_check_of_single_answers(made):
    """Its `gold` and `corrupt` are for examples."""

    class Taught(Echo):
        async def gold(self, item: Item) -> str:
            return "yes"

        def corrupt(self, item: Item) -> str:
            return "no"

    env = made(Taught)
    await env.setup()
    found = await model_free_check._check_without_model({"env": env, "items": env.items.train})
    assert (found["offered"], found["missing"]) == (False, ["score_answer"])
    examples = [await env.example(env.items.train[0], right=right) for right in (True, False)]
    assert [example[-1]["content"] for example in examples] == ["yes", "no"]


class Stubborn(Echo):
    """Asks another question when the server did not answer one."""

    async def play(self, item: Item, chat: Chat) -> Any:
        await chat.answer()
        try:
            await chat.answer("two?")
        except Exception:
            await chat.answer("three?")
        return 1.0


async def test_what_the_server_did_not_answer_was_never_said(made, generator):
    env = made(Stubborn, group_size=1)
    await env.setup()
    generator.say = lambda prompt, n: ["!500" if "two?" in prompt else "yes"]
    (rollout,) = await env.sample_rollouts({"question": "one?"}, 1)
    text = "<|user|>one?<|end|><|assistant|>yes<|end|><|user|>three?<|end|><|assistant|>yes<|end|>"
    assert env.tokenizer.decode(rollout.tokens) == text
    assert [message["content"] for message in rollout.messages] == ["one?", "yes", "three?", "yes"]


GUESS = ToolDefinition(
    "guess",
    "Guess.",
    {"properties": {"number": {"type": "integer", "maximum": 9}}, "required": ["number"]},
)


def test_calls_are_read_and_checked():
    answer = 'Let me.<tool_call>{"name": "guess", "arguments": {"number": 7}}</tool_call>'
    assert parse_tool_calls(answer, [GUESS]) == [ToolCall("guess", {"number": 7})]
    assert parse_tool_calls("no call", [GUESS]) == []
    assert '"name": "guess"' in describe_tools([GUESS])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"name": "guess"', "is not JSON"),
        ("[1]", "an object with `name` and `arguments`"),
        ('{"name": "look", "arguments": {}}', "there is no tool 'look'; available: guess"),
        ('{"name": "guess", "arguments": {"number": 10}}', "10 is greater than the maximum of 9"),
        ('{"name": "guess", "arguments": {}}', "'number' is a required property"),
        ('{"name": "guess", "arguments": 3}', "3 is not of type 'object'"),
        ('{"name": "guess", "arguments": {"number": NaN}}', "wrong: nan is not of type 'integer'"),
        ("[" * 100_000, "is not JSON"),
    ],
)
def test_a_malformed_call_is_told_to_the_model(text, said):
    with pytest.raises(MalformedCall, match=said):
        parse_tool_calls(f"<tool_call>{text}</tool_call>", [GUESS])


def test_half_a_call_is_malformed():
    with pytest.raises(MalformedCall, match="needs both"):
        parse_tool_calls('<tool_call>{"name": "guess"}', [GUESS])


async def test_a_game_of_guesses(made, generator):
    found = lookup.find_environment("guess_number")
    env = made(
        model_free_check.load_environment_class(Path(found.file_path), found.class_name),
        group_size=1,
    )
    await env.setup()
    game = {"game": 0, "number": 6}

    def call(number):
        return f'<tool_call>{{"name": "guess", "arguments": {{"number": {number}}}}}</tool_call>'

    async def played(*answers):
        said = iter(answers)
        generator.say = lambda prompt, n: [next(said)]
        (rollout,) = await env.sample_rollouts(game, 1)
        return rollout

    right = await played(call(6))
    third = await played(call(4), call(8), call(6))
    assert (right.outcome.reward, third.outcome.reward) == (1.0, 0.75)
    last = await played(call(1), call(2), call(3), call(6))
    assert all(is_solution(game.outcome.reward, env.solved) for game in (right, third, last))
    assert [message["content"] for message in third.messages if message["role"] == "tool"] == [
        "higher",
        "lower",
    ]
    assert (
        await played(call(1), call(2), call(3), call(4))
    ).outcome.reason == "the number was not found"
    assert (await played("six")).outcome.reason == "no tool was called"
    mended = await played("<tool_call>six</tool_call>", call(6))
    assert mended.outcome.reward == 0.875
    assert "is not JSON" in mended.messages[-2]["content"]
