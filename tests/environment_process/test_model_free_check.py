"""The stages that look at an environment inside its process."""

from __future__ import annotations

import pytest

from lachesis.config import run_config as run_config
from lachesis.environment_process import model_free_check as child_stages


class Checked:
    """As much of an environment as the stages ask for."""

    def __init__(self, score=1.0, items=3):
        self.score, self.items = score, items

    def __call__(self, config, servers):
        return self

    async def setup(self):
        pass

    async def get_next_item(self):
        self.items -= 1
        return "1+1=" if self.items >= 0 else None

    def gold(self, item):
        return "2"

    async def corrupt(self, item):
        return "3"

    def score_answer(self, item, answer):
        return self.score


@pytest.mark.parametrize("score", [None, "good", float("nan"), float("inf")])
async def test_a_verifier_without_a_number_fails_the_check(score):
    with pytest.raises(child_stages.StageFailed, match="a score must be a finite number"):
        await child_stages._check_without_model({"env": Checked(score), "items": ["1+1="]})


async def test_a_verifier_that_cannot_tell_is_a_fault():
    found = await child_stages._check_without_model({"env": Checked(0.5), "items": ["1+1="]})
    told = "corrupt() returned '3', which scores 0.5, and gold() '2', which scores 0.5, for '1+1='"
    assert found["faults"] == [f"{told}; the answer of corrupt() must score less"]
    found = await child_stages._check_without_model({"env": Checked(0.0), "items": ["1+1="]})
    assert found["faults"] == [
        "gold() returned '2' for '1+1=', which scores 0.0; it must return a right answer"
    ]
    assert (await child_stages._check_without_model({"env": object(), "items": []}))[
        "offered"
    ] is False


async def test_a_data_set_is_counted_or_empty():
    state = {"cls": Checked(items=3), "config": None, "yaml": {"openai": []}}
    assert await child_stages._read_items(state) == {"items": 3, "distinct": 1}
    with pytest.raises(child_stages.StageFailed, match="the data set is empty"):
        await child_stages._read_items({**state, "cls": Checked(items=0)})
