"""No answer to an agent is above 40 kB, and what was left out is said."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lachesis.agent_tools.answer_size import (
    MAX_ANSWER_BYTES,
    count_bytes,
    shorten_answer,
    take_page,
)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ({"log": "a" * 100_000 + "the end"}, "log: 4,000 of 100,007 characters"),
        ({"history": [{"x": "y" * 90}] * 5000}, "history: 200 of 5,000 items"),
        (
            {"models": [{"steps": [{"scores": [0.5] * 256}] * 100}] * 10},
            "models.0.steps: 25 of 100",
        ),
    ],
)
def test_the_head_and_the_tail_stay(answer, said):
    shorter = shorten_answer(answer)
    assert count_bytes(shorter) <= MAX_ANSWER_BYTES
    assert any(place.startswith(said) for place in shorter["shortened"]), shorter["shortened"]
    if "log" in answer:
        assert shorter["log"].startswith("aaa")
        assert shorter["log"].endswith("the end")


def test_a_short_answer_is_left_alone():
    answer = {"a": ["b" * 10_000, None, 1.5]}
    assert shorten_answer(answer) is answer


@given(st.lists(st.text(max_size=30_000), max_size=12), st.integers(0, 15))
def test_pages_hold_every_entry_once(entries, first):
    collected: list[Any] = []
    cursor: int | None = first
    while cursor is not None:
        page, following = take_page(entries, cursor)
        assert len(page) == 1 or count_bytes(page) <= MAX_ANSWER_BYTES
        collected += page
        cursor = following
    assert collected == entries[first:]


def test_three_hundred_runs_come_in_pages(ask, make_run):
    run_ids = [make_run(status="completed", name=f"run {number}").run_id for number in range(300)]
    listed: list[str] = []
    cursor: int | None = 0
    while cursor is not None:
        answer = ask("rl_list_runs", cursor=cursor)
        assert count_bytes(answer) <= MAX_ANSWER_BYTES
        assert answer["count"] == 300
        listed += [entry["run_id"] for entry in answer["runs"]]
        cursor = answer.get("next_cursor")
    assert sorted(listed) == sorted(run_ids)
    few = ask("rl_list_runs", limit=2, cursor=1)
    assert [entry["run_id"] for entry in few["runs"]] == listed[1:3]
