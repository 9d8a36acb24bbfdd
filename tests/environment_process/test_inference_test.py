"""How prompts find their items, and responses their scores, in the child of an inference test."""

import json
import random
from types import SimpleNamespace

import pytest

from lachesis.environment_process import inference_test


class Env:
    """As much of an environment as the probe asks for."""

    def __init__(self, items, group=None):
        self.items, self.group, self.asked = items, group, 0
        self.tokenizer = SimpleNamespace(
            decode=lambda tokens, skip_special_tokens=False: "".join(map(chr, tokens))
        )

    async def get_next_item(self):
        self.asked += 1
        return self.items.pop(0) if self.items else None

    async def collect_trajectories(self, item):
        return self.group, []


async def test_a_prompt_is_found_in_an_item_however_nested():
    items = [{"q": [("user", "other")]}, ("x", {"question": {"text": " 1+1= "}}), {"q": "2+2="}]
    found = await inference_test._find_items(Env(list(items)), ["1+1=", "absent"])
    assert found == {"1+1=": items[1]}


async def test_data_that_comes_in_random_order_is_searched_until_nothing_is_new():
    rng = random.Random(0)
    for _ in range(20):
        endless = [{"q": f"{rng.randint(0, 9)}+{rng.randint(0, 9)}="} for _ in range(5000)]
        wanted = f"{rng.randint(0, 9)}+{rng.randint(0, 9)}="
        assert wanted in await inference_test._find_items(Env(endless), [wanted])
    again = Env([{"q": "1"}, {"q": "2"}] * 2500)
    assert await inference_test._find_items(again, ["3"]) == {}
    assert again.asked < 300


async def test_an_environment_may_make_the_item_itself():
    env = Env([])
    env.item_from_prompt = lambda prompt: {"q": prompt} if prompt == "a" else None  # type: ignore[attr-defined]
    assert await inference_test._find_items(env, ["a", "b"]) == {"a": {"q": "a"}}


async def test_samples_of_ids_know_what_was_asked(tmp_path):
    group = {"tokens": [[66, 67, 65]], "masks": [[-100, -100, 65]], "scores": [1.0]}

    class Asked(Env):
        pass

    inference_test._install_sample_writer(
        Asked, tmp_path / "samples.jsonl", inference_test.SampledAnswers()
    )
    await Asked([], group).collect_trajectories({})
    assert json.loads((tmp_path / "samples.jsonl").read_text()) == {
        "prompt": "BC",
        "responses": ["A"],
        "scores": [1.0],
    }


@pytest.mark.parametrize(
    ("group", "texts", "responses"),
    [
        (
            {"tokens": [[1, 65], [1, 66]], "masks": [[-100, 65], [-100, 66]], "scores": [1.0, 0.0]},
            [],
            ["A", "B"],
        ),
        (
            {
                "tokens": [[1, 65]],
                "masks": [[-100, 65]],
                "scores": [1.0],
                "messages": [[{"content": "hi"}]],
            },
            [],
            ["hi"],
        ),
        ({"tokens": [[0, 1, 2]], "masks": [[0, 1, 2]], "scores": [1.0]}, ["seven"], ["seven"]),
        (
            {"tokens": [[0, 1, 2]], "masks": [[0, 1, 2]], "scores": [1.0]},
            ["one", "too many"],
            [None],
        ),
    ],
    ids=["tokens", "messages", "constants for tokens", "constants that cannot be told apart"],
)
async def test_a_response_stands_beside_its_own_score(group, texts, responses):
    answer = await inference_test._score_item(Env([], group), {}, texts)
    assert answer["responses"] == responses
    assert answer["scores"] == group["scores"]
