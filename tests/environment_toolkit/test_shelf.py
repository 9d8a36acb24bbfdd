"""The environments of this project: right answers are right, wrong ones are worth less, and bad
ones do no harm.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lachesis.environment_catalog import lookup
from lachesis.environment_process import model_free_check
from lachesis.environment_process.pretraining_examples import make_warmup_examples
from tests.environment_toolkit.conftest import unconfined

Make = Callable[..., Any]
ROOT = Path(__file__).resolve().parents[2]
SHELF = [found.name for found in lookup.scan_environments([ROOT / "environments"]).environments]
NEEDS_SANDBOX = pytest.mark.skipif(
    bool(unconfined()), reason=f"this machine cannot confine a program: {unconfined()}"
)
SINGLE = [
    pytest.param("code_unit_tests", marks=NEEDS_SANDBOX),
    "countdown",
    "format_json",
    "reverse_text",
]
PROBLEM = {
    "question": "Ann has 3 pens and buys 4. How many?",
    "answer": "3+4=<<3+4=7>>7 pens.\n#### 7",
}


def environment(name):
    found = lookup.find_environment(name, [ROOT / "environments"])
    return model_free_check.load_environment_class(Path(found.file_path), found.class_name)


async def scored(env, item, answer):
    outcome = await env.score_safely(env.score_answer, item, answer)
    return (None if outcome.reward is None else round(outcome.reward, 6)), outcome.reason


def test_the_shelf_is_found():
    names = "arithmetic code_unit_tests countdown format_json gsm8k guess_number reverse_text "
    names += "reward_function "
    names += "verifiers_environment"
    assert names.split() == SHELF
    assert all(
        found.description
        for found in lookup.scan_environments([ROOT / "environments"]).environments
    )


@pytest.mark.parametrize("name", SINGLE)
async def test_gold_is_solved_and_corrupt_is_not(made, name):
    env = made(environment(name))
    await env.setup()
    for item in [*env.items.train[:8], *env.items.held_out[:4]]:
        right, _ = await scored(env, item, env.gold(item))
        wrong, _ = await scored(env, item, env.corrupt(item))
        assert right == env.solved, (item, env.gold(item))
        assert wrong is not None
        assert wrong < right, (item, wrong)
        assert json.loads(json.dumps(item)) == item


@pytest.mark.parametrize("name", SINGLE)
@pytest.mark.parametrize(
    "answer",
    ["", " ", "\0", "\ud800", "[" * 5000, "9" * 100_000, "<|end|>", "é" * 50, "{}", "0/0", "None"],
)
async def test_whatever_a_model_says_is_scored(made, name, answer):
    env = made(environment(name), verifier_timeout_s=20)
    await env.setup()
    reward, reason = await scored(env, env.items.train[0], answer)
    assert reward is not None, reason
    assert 0 <= reward < env.solved


@pytest.mark.parametrize(
    "name", [one for one in SHELF if one not in ("arithmetic", "verifiers_environment")]
)
def test_every_field_is_described(name):
    config = type(environment(name).config_init()[0])
    assert all(config.model_fields[field].description for field in config.__annotations__)


async def test_countdown_counts_what_is_wrong_by_its_name(made):
    env = made(environment("countdown"), numbers=3)
    await env.setup()
    item = {"question": "", "numbers": [2, 3, 4], "target": 10}
    assert await scored(env, item, "2*3+4") == (1.0, None)
    assert await scored(env, item, "(4-2)*3") == (0.1, None)
    assert await scored(env, item, "4/(3-2-1)") == (0.0, "the answer does not use each number once")
    assert await scored(env, item, "2/(3-4)+1") == (0.0, "the answer does not use each number once")
    assert await scored(env, item, "4+3+2=9") == (0.0, "the answer is not an expression")
    strange = "the answer contains something other than numbers and + - * /"
    assert await scored(env, item, "2**3**4") == (0.0, strange)
    assert await scored(env, item, "f(2,3,4)") == (0.0, strange)
    assert await scored(env, {**item, "numbers": [2, 2, 4]}, "4/(2-2)") == (0.1, None)
    assert await scored(env, {**item, "numbers": [1, 2], "target": 3}, "True+2") == (
        0.0,
        "the answer contains something other than numbers and + - * /",
    )


async def test_json_is_worth_as_much_as_is_right_of_it(made):
    env = made(environment("format_json"))
    await env.setup()
    item = {"question": "", "answer": {"name": "Ada", "age": 36, "city": "Rome"}}
    worth = {
        '{"name": "Ada", "age": 36, "city": "Rome"}': 1.0,
        '{"name": "Ada", "age": 37, "city": "Rome"}': 0.75,
        '{"name": "Ada", "age": "36", "city": "Rome"}': 0.5,
        '{"name": "Ada", "age": true, "city": "Rome"}': 0.5,
        '{"name": "Ada"}': 0.25,
        '["Ada", 36, "Rome"]': 0.0,
        "Ada is 36": 0.0,
    }
    assert {answer: (await scored(env, item, answer))[0] for answer in worth} == worth


@pytest.mark.parametrize(
    ("source", "reward", "reason"),
    [
        ("def f(x): return x+3", 1.0, None),
        ("Here you are:\n```python\ndef f(x):\n    return x + 3\n```", 1.0, None),
        ("def f(x): return x+4", 0.2, None),
        ("def f(x): return abs(x)+3", pytest.approx(0.2 + 0.8 * 5 / 6, abs=1e-6), None),
        ("def f(x): return float(x+3)", 0.2, None),
        ("def f(x): return 1/x", 0.0, None),
        ("def g(x): return x+3", 0.0, None),
        ("def f(x) return x", 0.0, "the program: failed"),
        ("while True: pass", 0.0, "the program: timed out"),
        ("x = 'a' * 10**12", 0.0, "the program: out of memory"),
        ("import os\nos.fork()", 0.0, "the program: failed"),
        ("import socket\nsocket.socket()", 0.0, "the program: failed"),
        ("open('/tmp/stolen', 'w')", 0.0, "the program: failed"),
        ("print('x' * 10**6)", 0.0, "the program: too much output"),
        ("import os\nos._exit(0)", 0.0, "the program hid its results"),
        ("import atexit\natexit.register(print, '\\n[]')", 0.0, "the program hid its results"),
        ("class E(int):\n    __eq__ = lambda a, b: True\ndef f(x): return E(0)", 0.2, None),
        ("import json\njson.dumps = lambda *a, **b: '[]'", 0.0, "the program hid its results"),
    ],
)
@NEEDS_SANDBOX
async def test_code_is_worth_what_it_computes(
    made: Make, source: str, reward: float, reason: str | None
) -> None:
    env = made(environment("code_unit_tests"), seconds=1.0, memory_mib=128)
    await env.setup()
    item = next(
        one
        for one in [*env.items.train, *env.items.held_out]
        if (one["kind"], one["k"]) == ("plus", 3)
    )
    assert await scored(env, item, source) == (reward, reason)


@pytest.fixture
def problems(tmp_path):
    file = tmp_path / "problems.jsonl"
    more = [
        {"question": f"What is {n} times 1,000?", "answer": f"#### {n},000"} for n in range(1, 30)
    ]
    file.write_text(
        "".join(json.dumps(one) + "\n" for one in [PROBLEM, *more, {"question": "broken"}])
    )
    return file


@pytest.mark.parametrize(
    ("answer", "reward", "reason"),
    [
        ("It is \\boxed{7}.", 1.0, None),
        ("First \\boxed{8}, no, \\boxed{7}", 1.0, None),
        ("\\boxed{7.0}", 1.0, None),
        ("\\boxed{\\frac{14}{2}}", 1.0, None),
        ("\\boxed{7 \\text{ pens}}", 1.0, None),
        ("\\boxed{8}", 0.0, None),
        ("7", 0.0, "no number in \\boxed{}"),
        ("\\boxed{}", 0.0, None),
        ("\\boxed{9^{9^{9^{9}}}}", 0.0, "something in \\boxed{} that is not a number"),
        ("\\boxed{99999999!}", 0.0, "something in \\boxed{} that is not a number"),
        ("\\boxed" + "{" * 1000, 0.0, None),
    ],
)
async def test_a_number_in_a_box_is_compared(made, problems, answer, reward, reason):
    env = made(environment("gsm8k"), dataset=str(problems), verifier_timeout_s=20)
    await env.setup()
    assert await scored(env, PROBLEM, answer) == (reward, reason)


async def test_problems_from_a_file(made, problems, caplog):
    env = made(environment("gsm8k"), dataset=str(problems), few_shot=2)
    await env.setup()
    assert "1 of 31 rows are left out: 1 has no 'answer'" in caplog.text
    asked = [one["question"] for one in [*env.items.train, *env.items.held_out]]
    shown = env.build_messages(env.items.train[0])
    assert [one["role"] for one in shown] == [
        "system",
        "user",
        "assistant",
        "user",
        "assistant",
        "user",
    ]
    assert shown[2]["content"] == "3+4=<<3+4=7>>7 pens. \\boxed{7}"
    assert len(asked) == 28, "what is shown as solved is not asked"
    assert not {shown[1]["content"], shown[3]["content"]} & set(asked)
    for item in env.items.train[:5]:
        assert (await scored(env, item, env.gold(item)))[0] == 1.0
        assert (await scored(env, item, env.corrupt(item)))[0] == 0.0


async def test_a_long_right_answer_is_worth_less_when_asked_for(made, problems, generator):
    env = made(
        environment("gsm8k"), dataset=str(problems), length_penalty=0.5, max_answer_tokens=100
    )
    await env.setup()
    generator.say = lambda prompt, n: [
        "\\boxed{7}",
        "x" * 40 + "\\boxed{7}",
        "\\boxed{8}",
        "x" * 40,
    ]
    rewards = [one.outcome.reward for one in await env.sample_rollouts(PROBLEM, 4)]
    assert rewards == [
        pytest.approx(1 - 0.5 * 10 / 100),
        pytest.approx(1 - 0.5 * 50 / 100),
        0.0,
        0.0,
    ]


async def test_a_file_to_evaluate_on_is_not_trained_on(made, problems, tmp_path):
    held_out = tmp_path / "test.jsonl"
    held_out.write_text(json.dumps(PROBLEM) + "\n")
    env = made(environment("gsm8k"), dataset=str(problems), held_out_dataset=str(held_out))
    await env.setup()
    assert env.items.held_out == [PROBLEM]
    assert PROBLEM not in env.items.train


async def test_no_solved_problem_that_is_shown_is_held_out(made, tmp_path):
    """Neither in one file, where a row stands twice, nor where the file to evaluate on has it."""
    whole, held_out = tmp_path / "problems.jsonl", tmp_path / "test.jsonl"
    lines = [
        json.dumps({"question": f"What is {n} + {n}?", "answer": f"#### {2 * n}"}) + "\n"
        for n in range(40)
    ]
    whole.write_text("".join([*lines, *lines]))
    held_out.write_text("".join(lines[:5]))
    for fields in ({}, {"held_out_dataset": str(held_out)}):
        env = made(environment("gsm8k"), dataset=str(whole), few_shot=8, **fields)
        await env.setup()
        shown = {few_shot_item["question"] for few_shot_item in env.few_shot_items}
        assert len(env.few_shot_items) == 8
        assert not shown & {one["question"] for one in [*env.items.train, *env.items.held_out]}


@pytest.mark.parametrize("name", SINGLE)
def test_examples_to_imitate_come_from_the_training_items(name):
    found = lookup.find_environment(name, [ROOT / "environments"])
    request = {"count": 40, "share": 0.5, "seed": 1, "values": {}}
    conversations = make_warmup_examples(Path(found.file_path), found.class_name, request)
    assert len(conversations) == 40
    assert {
        tuple(message["role"] for message in conversation) for conversation in conversations
    } == {("user", "assistant")}
    if name == "countdown":
        assert conversations == lookup.collect_examples(found, {}, count=40, share=0.5, seed=1), (
            "the same for the same seed, in a process of its own"
        )


FUNCTION = """
from __future__ import annotations
import dataclasses
import beside_mine

@dataclasses.dataclass
class Row:
    prompt: str

def reward(prompt, completion, answer):
    if completion == "bug":
        raise ValueError("a bug")
    return completion == answer

def whole(**row):
    return len(row)
"""


async def test_a_function_and_a_file_are_an_environment(made, tmp_path):
    (tmp_path / "mine.py").write_text(FUNCTION)
    (tmp_path / "beside_mine.py").touch()
    data = [{"prompt": f"say {n}", "answer": str(n)} for n in range(9)] + [
        {"prompt": [{"role": "user", "content": "hi"}]}
    ]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(one) + "\n" for one in data))
    fields = {"function": f"{tmp_path}/mine.py:reward", "dataset": str(tmp_path / "data.jsonl")}
    env = made(environment("reward_function"), **fields)
    await env.setup()
    item = {"prompt": "say 1", "answer": "1"}
    assert await scored(env, item, "1") == (1.0, None)
    assert await scored(env, item, "2") == (0.0, None)
    reward, reason = await scored(env, item, "bug")
    assert (reward, re.sub(r":\d+:", ":N:", str(reason))) == (
        None,
        "the verifier raised ValueError at mine.py:N: a bug",
    )
    assert {len(env.build_messages(one)) for one in [*env.items.train, *env.items.held_out]} == {1}
    every = made(
        environment("reward_function"), **{**fields, "function": f"{tmp_path}/mine.py:whole"}
    )
    await every.setup()
    assert await scored(every, item, "1") == (3.0, None)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("", "is ''"),
        ("mine.py:reward", "the absolute path of an existing file"),
        ("/gone.py:reward", "an existing file"),
        ("{here}/mine.py:absent", "no function 'absent'"),
    ],
)
async def test_a_function_that_is_not_there_is_told(made, tmp_path, function, said):
    (tmp_path / "mine.py").write_text(FUNCTION)
    (tmp_path / "beside_mine.py").touch()
    env = made(
        environment("reward_function"), function=function.format(here=tmp_path), dataset="x.jsonl"
    )
    with pytest.raises(Exception, match=said):
        await env.setup()
