"""Facts written as JSON: an answer has components, and each is rewarded by itself, so that a model finds its way."""

import json
import random
from collections.abc import Iterable
from typing import Any

from pydantic import Field

from lachesis.environment import Item, TaskEnv, TaskEnvConfig

NAMES = ("Ada", "Bo", "Cy", "Dee", "Eli", "Flo", "Gus", "Ida")
CITIES = ("Rome", "Oslo", "Lima", "Bonn", "Kyiv", "Riga")
SHARE = 0.25
"""Of the reward, for each of four components."""


class FormatJsonConfig(TaskEnvConfig):
    max_answer_tokens: int = Field(48, ge=8, le=4096, description="Most tokens of one answer")
    oldest: int = Field(99, ge=2, le=120, description="Ages from 1 to this")


class FormatJsonEnv(TaskEnv):
    """Write a name, an age and a city as JSON: a quarter each for JSON, the keys, the types and the values."""

    name = "format_json"
    env_config_cls = FormatJsonConfig
    config: FormatJsonConfig

    def load_dataset(self) -> Iterable[Item]:
        draw = random.Random("format_json")
        every = [(name, age, city) for name in NAMES for age in range(1, self.config.oldest + 1) for city in CITIES]
        return [_item(*one) for one in draw.sample(every, min(1000, len(every)))]

    def score_answer(self, item: Item, answer: str) -> dict[str, float]:
        right: dict[str, Any] = item["answer"]
        found = _parsed(answer)
        is_object = isinstance(found, dict)
        keys = is_object and set(found) == set(right)
        types = keys and all(type(found[key]) is type(right[key]) for key in right)
        values = types and found == right
        return {"json": SHARE * is_object, "keys": SHARE * keys, "types": SHARE * types, "values": SHARE * values}

    def gold(self, item: Item) -> str:
        return json.dumps(item["answer"], separators=(",", ":"))

    def corrupt(self, item: Item) -> str:
        """With one fault of those that models make."""
        right = item["answer"]
        elsewhere = random.choice([city for city in CITIES if city != right["city"]])
        as_text, another = {**right, "age": str(right["age"])}, {**right, "city": elsewhere}
        without = {"name": right["name"], "age": right["age"]}
        return random.choice(
            [self.gold(item)[:-1], *(json.dumps(one, separators=(",", ":")) for one in (as_text, another, without))]
        )


def _item(name: str, age: int, city: str) -> Item:
    return {"question": f"{name}, {age}, {city}", "answer": {"name": name, "age": age, "city": city}}


def _parsed(answer: str) -> Any:
    try:
        return json.loads(answer)
    except (ValueError, RecursionError):
        return None


if __name__ == "__main__":
    FormatJsonEnv.cli()
