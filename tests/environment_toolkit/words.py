"""An environment whose answers name what its verifier does: score, fail, or hang."""

import time
from collections.abc import Callable
from typing import Any

from lachesis.environment import Invalid, Item, TaskEnv, zero


class Words(TaskEnv):
    name = "words"

    def load_dataset(self) -> list[Item]:
        return [{"question": f"word {number}", "answer": str(number)} for number in range(20)]

    def score_answer(self, item: Item, answer: str) -> Any:
        return SCORES[answer]() if answer in SCORES else float(answer == item["answer"])


def _raise(error: Exception) -> Any:
    raise error


async def _later() -> float:
    return 0.75


SCORES: dict[str, Callable[[], Any]] = {
    "half": lambda: 0.5,
    "parts": lambda: {"form": 0.25, "value": 0.5},
    "zero": lambda: zero("it rambles"),
    "nan": lambda: float("nan"),
    "string": lambda: "good",
    "none": lambda: None,
    "nan part": lambda: {"form": float("nan")},
    "raises": lambda: _raise(KeyError("answer")),
    "invalid": lambda: _raise(Invalid("the judge is away")),
    "hangs": lambda: time.sleep(30),
    "later": _later,
}
