"""Write facts as JSON; each part of the answer is rewarded separately."""

import json
import random
from collections.abc import Iterable
from typing import Any

from pydantic import Field

from lachesis.environment import Item, TaskEnv, TaskEnvConfig

NAMES = ("Ada", "Bo", "Cy", "Dee", "Eli", "Flo", "Gus", "Ida")
CITIES = ("Rome", "Oslo", "Lima", "Bonn", "Kyiv", "Riga")
COMPONENT_REWARD = 0.25
"""Reward of each of the four parts."""


class FormatJsonConfig(TaskEnvConfig):
    max_answer_tokens: int = Field(48, ge=8, le=4096, description="Maximum tokens of one answer")
    oldest: int = Field(99, ge=2, le=120, description="Largest age")


class FormatJsonEnv(TaskEnv):
    """Write name, age and city as JSON: a quarter each for valid JSON, keys, types and values."""

    name = "format_json"
    env_config_cls = FormatJsonConfig
    config: FormatJsonConfig

    def load_dataset(self) -> Iterable[Item]:
        rng = random.Random("format_json")
        all_facts = [
            (name, age, city)
            for name in NAMES
            for age in range(1, self.config.oldest + 1)
            for city in CITIES
        ]
        return [_build_item(*fact) for fact in rng.sample(all_facts, min(1000, len(all_facts)))]

    def score_answer(self, item: Item, answer: str) -> dict[str, float]:
        expected: dict[str, Any] = item["answer"]
        parsed = _parse_json(answer)
        is_object = isinstance(parsed, dict)
        has_right_keys = is_object and set(parsed) == set(expected)
        has_right_types = has_right_keys and all(
            type(parsed[key]) is type(expected[key]) for key in expected
        )
        has_right_values = has_right_types and parsed == expected
        return {
            "json": COMPONENT_REWARD * is_object,
            "keys": COMPONENT_REWARD * has_right_keys,
            "types": COMPONENT_REWARD * has_right_types,
            "values": COMPONENT_REWARD * has_right_values,
        }

    def gold(self, item: Item) -> str:
        return json.dumps(item["answer"], separators=(",", ":"))

    def corrupt(self, item: Item) -> str:
        """Return an answer with one of the faults that models make."""
        expected = item["answer"]
        wrong_city = random.choice([city for city in CITIES if city != expected["city"]])
        with_text_age, with_wrong_city = (
            {**expected, "age": str(expected["age"])},
            {**expected, "city": wrong_city},
        )
        without_city = {"name": expected["name"], "age": expected["age"]}
        return random.choice(
            [
                self.gold(item)[:-1],
                *(
                    json.dumps(wrong_answer, separators=(",", ":"))
                    for wrong_answer in (with_text_age, with_wrong_city, without_city)
                ),
            ]
        )


def _build_item(name: str, age: int, city: str) -> Item:
    return {
        "question": f"{name}, {age}, {city}",
        "answer": {"name": name, "age": age, "city": city},
    }


def _parse_json(answer: str) -> Any:
    try:
        return json.loads(answer)
    except (ValueError, RecursionError):
        return None


if __name__ == "__main__":
    FormatJsonEnv.cli()
