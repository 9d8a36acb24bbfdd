"""Rows and splits."""

import logging
import random

import pytest

from lachesis.environment import DatasetError, rows
from lachesis.environment_toolkit.dataset import build_given_split, split_items


def question(item):
    return item["q"]


def items(count):
    return [{"q": f"question {number}", "n": number} for number in range(count)]


def test_a_split_depends_on_what_is_asked_and_on_nothing_else():
    first = split_items(items(300), question, held_out_share=0.2, max_held_out=1000)
    shuffled = items(500)
    random.Random(0).shuffle(shuffled)
    later = split_items(shuffled, question, held_out_share=0.2, max_held_out=1000)
    old = {one["q"] for one in first.held_out}
    assert old <= {one["q"] for one in later.held_out}, "more rows in another order move nothing"
    assert 30 < len(old) < 90
    assert not old & {one["q"] for one in first.train}


def test_one_question_is_on_one_side_only():
    doubled = [*items(50), *[{"q": f"  question   {number}\n"} for number in range(50)]]
    made = split_items(doubled, question, held_out_share=0.3, max_held_out=1000)
    asked = [{" ".join(one["q"].split()) for one in side} for side in (made.train, made.held_out)]
    assert not asked[0] & asked[1]
    assert len(asked[1]) == len(made.held_out), "an evaluation asks each once"


@pytest.mark.parametrize("share", [1e-9, 0.5, 1 - 1e-9])
def test_neither_side_is_empty(share):
    made = split_items(items(2), question, held_out_share=share, max_held_out=10)
    assert (len(made.train), len(made.held_out)) == (1, 1)


def test_what_is_held_out_is_taken_out_of_the_training_items(caplog):
    made = build_given_split(items(10), items(3), question, max_held_out=2)
    assert [one["n"] for one in made.train] == list(range(3, 10))
    assert (made.num_overlapping, len(made.held_out)) == (3, 2)
    assert "3 training items are left out" in caplog.text
    with pytest.raises(DatasetError, match="0 items to train on"):
        build_given_split(items(3), items(3), question, max_held_out=2)


def test_broken_rows_are_left_out_and_counted(tmp_path, caplog):
    file = tmp_path / "data.jsonl"
    file.write_text(
        '{"q": "a", "a": "1"}\nnot json\n[1]\n{"q": "b"}\n\n{"q": " ", "a": "2"}\n{"q": "c", "a": '
        "0}\n"
    )
    with caplog.at_level(logging.WARNING):
        found = rows(file, needed=("q", "a"))
    assert [one["q"] for one in found] == ["a", "c"]
    assert "row 2 is left out: is not a JSON object" in caplog.text
    assert (
        "4 of 6 rows are left out: 2 is not a JSON object, 1 has no 'a', 1 has no 'q'"
        in caplog.text
    )


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "cannot be read: No such file"),
        ("", "it is empty"),
        ('{"q": 1}\n', "has no 'a'"),
        ("\xff", "is not a JSON object"),
    ],
)
def test_a_source_without_a_row_is_an_error(tmp_path, content, said):
    file = tmp_path / "data.jsonl"
    if content is not None:
        file.write_text(content, encoding="latin-1")
    with pytest.raises(DatasetError, match=said):
        rows(file, needed=("q", "a"))


def test_a_row_ends_where_its_line_does(tmp_path):
    (tmp_path / "rows.jsonl").write_text(
        '{"q": "one\u2028two\u0085three"}\r\n{"q": "four"}', encoding="utf-8"
    )
    assert [row["q"] for row in rows(tmp_path / "rows.jsonl", needed=("q",))] == [
        "one\u2028two\u0085three",
        "four",
    ]


def test_a_data_set_of_the_hub_that_cannot_be_had_is_named(monkeypatch):
    # Both libraries read the variable when they are imported, which an earlier test may have done.
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(
        DatasetError,
        match=r"nobody/nothing \(main\), split test cannot be loaded.*a local JSONL file",
    ):
        rows("nobody/nothing", needed=("q",), subset="main", split="test")
