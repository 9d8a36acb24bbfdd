"""Write words backwards; the smallest use of `TaskEnv`."""

import difflib
import random
from collections.abc import Iterable

from pydantic import Field

from lachesis.environment import Item, TaskEnv, TaskEnvConfig

ALPHABET = "abcdefghijklmnopqrstuvwxyz"


class ReverseTextConfig(TaskEnvConfig):
    max_answer_tokens: int = Field(16, ge=2, le=4096, description="Maximum tokens of one answer")
    words: int = Field(400, ge=2, le=1_000_000, description="Number of words")
    shortest: int = Field(3, ge=1, le=100, description="Letters of the shortest word")
    longest: int = Field(4, ge=1, le=100, description="Letters of the longest word")
    letters: int = Field(8, ge=2, le=26, description="Number of letters of the alphabet to use")


class ReverseTextEnv(TaskEnv):
    """Write a word backwards: half the reward for similar letters, half for the exact word."""

    name = "reverse_text"
    env_config_cls = ReverseTextConfig
    config: ReverseTextConfig

    def load_dataset(self) -> Iterable[Item]:
        rng, config = random.Random("reverse_text"), self.config
        letters = ALPHABET[: config.letters]
        lengths = range(config.shortest, max(config.shortest, config.longest) + 1)
        words = {"".join(rng.choices(letters, k=rng.choice(lengths))) for _ in range(config.words)}
        return [{"question": f"{word}<", "answer": word[::-1]} for word in sorted(words)]

    def score_answer(self, item: Item, answer: str) -> dict[str, float]:
        stripped = answer.strip()
        similarity = difflib.SequenceMatcher(None, stripped, item["answer"], autojunk=False).ratio()
        return {"letters": similarity / 2, "exact": (stripped == item["answer"]) / 2}

    def gold(self, item: Item) -> str:
        return str(item["answer"])

    def corrupt(self, item: Item) -> str:
        return str(item["answer"])[1:] + ALPHABET[random.randrange(self.config.letters)]


if __name__ == "__main__":
    ReverseTextEnv.cli()
