"""Answers of a group: equal ones together, what an item expects, and the colours of tokens."""

import math
from typing import Any

import pytest

from lachesis.reporting.rollouts import build_answers, read_held_out_groups, read_item_facts
from lachesis.web.token_text import (
    decode_tokens,
    load_tokenizer,
    name_difference,
    name_heat,
    split_answer,
)
from tests.harness.home import make_row


@pytest.fixture(scope="module")
def tokenizer(random_model):
    loaded = load_tokenizer(random_model)
    assert loaded is not None
    return loaded


def test_equal_answers_are_one_column_and_the_worst_comes_first():
    rows = [make_row(1, 0, place, score) for place, score in enumerate([1.0, 0.0, 1.0, 1.0])]
    rows.append(make_row(1, 0, 4, 0.0) | {"score": None, "outcome": "invalid", "advantage": None})
    rows = [row | {"parts": dict(row["parts"])} for row in rows]
    columns = build_answers(rows, None)
    assert [(column.score, column.count) for column in columns] == [(None, 1), (0.0, 1), (1.0, 3)]
    assert [column.tone for column in columns] == ["level", "down", "up"]
    assert [column.reason for column in columns] == ["no score", "wrong", "right"]
    assert columns[2].parts == {"form": 0.5}
    assert columns[1].bar_start == 0.0
    assert (columns[2].bar_start, columns[2].bar_width) == (48.0, 48.0)


def test_tokens_are_those_of_the_text(tokenizer):
    text = "12+3= é € 漢"
    tokens = tokenizer.encode(text, add_special_tokens=False).ids
    texts = decode_tokens(tokenizer, tokens)
    assert len(texts) == len(tokens)
    assert "".join(texts) == text


def test_an_answer_of_several_turns_is_a_conversation(tokenizer):
    tokens = tokenizer.encode("a1b2", add_special_tokens=False).ids
    row: dict[str, Any] = {
        "tokens": tokens,
        "sampled": [False, True, False, True],
        "logprobs": [None, -0.01, None, -5.0],
        "trained_logprobs": [None, -0.01, None, -5.5],
    }
    segments = split_answer(row, tokenizer)
    assert [(segment.is_sampled, segment.text) for segment in segments] == [
        (True, "1"), (False, "b"), (True, "2")
    ]  # fmt: skip
    assert [segment.tokens[0].level for segment in segments] == ["", "", "heat-6"]
    by_difference = split_answer(row, tokenizer, by_difference=True)
    assert [segment.tokens[0].level for segment in by_difference] == ["", "", "heat-3"]
    assert split_answer({"tokens": [1], "sampled": [False]}, tokenizer) == []


def test_a_model_without_a_tokenizer_here_has_none(tmp_path):
    assert load_tokenizer("nobody/has-this-model") is None
    (tmp_path / "tokenizer.json").write_text("{")
    assert load_tokenizer(str(tmp_path)) is None


@pytest.mark.parametrize(
    ("probability", "level"),
    [(1.0, ""), (0.89, "heat-1"), (0.5, "heat-2"), (0.3, "heat-3"), (0.1, "heat-4"),
     (0.02, "heat-5"), (0.001, "heat-6")],
)  # fmt: skip
def test_less_probable_tokens_are_hotter(probability, level):
    assert name_heat(math.log(probability)) == level


def test_differences_have_two_hues():
    levels = [name_difference(value) for value in (None, 0.01, 0.05, 0.3, 2.0, -0.1, -0.5, -3.0)]
    assert levels == ["", "", "heat-1", "heat-3", "heat-5", "minus-1", "minus-2", "minus-3"]
    assert name_heat(None) == ""


@pytest.mark.parametrize(
    ("item", "expected", "facts"),
    [
        ('{"question": "1+2=", "answer": "3"}', "3", []),
        ('{"question": "1+2=", "target": 3, "level": "easy"}', "3", [("level", "easy")]),
        ('{"tests": [1, 2]}', None, [("tests", "[1, 2]")]),
        ("[1]", None, [("item", "[1]")]),
        ("not JSON", None, [("item", "not JSON")]),
        (None, None, []),
    ],
)
def test_an_item_says_what_it_expects(item, expected, facts):
    assert read_item_facts(item, "1+2=") == (expected, facts)


def test_held_out_answers_are_grouped_by_item():
    samples = [
        {"question": "1+1=", "answer": "2", "model_answer": "2", "score": 1.0},
        {"question": "2+2=", "answer": "4", "model_answer": "5", "score": 0.0},
        {"question": "1+1=", "answer": "2", "model_answer": "3", "score": 0},
        {"question": "3+3=", "model_answer": "6"},
        {"score": 1.0},
    ]
    groups = read_held_out_groups(samples)
    assert [(group.prompt, group.number, group.num_right) for group in groups] == [
        ("2+2=", 1, 0), ("1+1=", 0, 1)
    ]  # fmt: skip
    assert groups[0].expected == "4"
    assert [group.prompt for group in read_held_out_groups(samples, "5")] == ["2+2="]
