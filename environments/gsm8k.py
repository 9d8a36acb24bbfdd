"""Grade-school problems in words (Cobbe et al. 2021, arXiv:2110.14168), answered with a number in \\boxed{}."""

import logging
import random
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from math_verify import LatexExtractionConfig, parse, verify
from pydantic import Field

from lachesis.environment import Item, Outcome, Rollout, TaskEnv, TaskEnvConfig, rows, zero

SYSTEM = "Solve the problem step by step, and put the final number in \\boxed{}."
BOXED = [LatexExtractionConfig(boxed_match_priority=0, try_extract_without_anchor=False)]
POWERS = re.compile(r"\^|\*\*|!|\\(?:uparrow|binom|prod|sum|int|Gamma)")
"""What no answer here needs, and what can keep a computer busy for years."""
MOST_CHARACTERS = 100
logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns at each call that the time limit is somebody else's


class Gsm8kConfig(TaskEnvConfig):
    system_prompt: str | None = Field(SYSTEM, description="Said before each question, as the system's message")
    max_answer_tokens: int = Field(512, ge=8, le=131_072, description="Most tokens of one answer")
    dataset: str = Field("openai/gsm8k", description="Of Hugging Face, or a JSONL file with `question` and `answer`")
    held_out_dataset: str | None = Field(
        None, description="The path of a JSONL file to evaluate on; without it a part of `dataset`"
    )
    few_shot: int = Field(0, ge=0, le=32, description="Solved problems before each question; they are not trained on")
    length_penalty: float = Field(0.0, ge=0, le=1, description="Of a right answer's reward, lost in proportion to its length")


class Gsm8kEnv(TaskEnv):
    """Grade-school mathematics: 1 for the right number in \\boxed{}, less for a long answer when asked for."""

    name = "gsm8k"
    env_config_cls = Gsm8kConfig
    config: Gsm8kConfig
    solved = 1e-9

    def load_dataset(self) -> Iterable[Item] | Mapping[str, Iterable[Item]]:
        config, needed = self.config, ("question", "answer")
        local = Path(config.dataset).suffix in (".jsonl", ".json", ".ndjson")
        train = rows(config.dataset, needed=needed, subset=None if local else "main")
        if config.held_out_dataset:
            held_out = rows(config.held_out_dataset, needed=needed)
        else:
            held_out = [] if local else rows(config.dataset, needed=needed, subset="main", split="test")
        asked = {_asked(one) for one in held_out}
        self.shots = [one for one in train if _asked(one) not in asked][: config.few_shot]
        shown = {_asked(one) for one in self.shots}
        train = [one for one in train if _asked(one) not in shown]
        return {"train": train, "held_out": held_out} if held_out else train

    def prompt(self, item: Item) -> list[dict[str, Any]]:
        shown = [{"role": role, "content": text} for one in self.shots for role, text in _turns(one)]
        return [*shown, {"role": "user", "content": item["question"]}]

    def identity(self, item: Item) -> str:
        return str(item["question"])

    def score_rollout(self, item: Item, rollout: Rollout) -> float | Outcome:
        found = self.score_answer(item, rollout.answer)
        if not isinstance(found, float) or found == 0:
            return found
        return found * (1 - self.config.length_penalty * rollout.sampled_tokens / self.config.max_answer_tokens)

    def score_answer(self, item: Item, answer: str) -> float | Outcome:
        boxed = answer.rpartition("\\boxed")[2] if "\\boxed" in answer else ""
        if not boxed:
            return zero("no number in \\boxed{}")
        if POWERS.search(boxed[:MOST_CHARACTERS]):
            return zero("something in \\boxed{} that is no number")
        found = parse(f"\\boxed{boxed[:MOST_CHARACTERS]}", BOXED, parsing_timeout=None)
        return float(verify(parse(_number(item), parsing_timeout=None), found, timeout_seconds=None))

    def gold(self, item: Item) -> str:
        return f"{_steps(item)} \\boxed{{{_number(item)}}}"

    def corrupt(self, item: Item) -> str:
        return random.choice([f"\\boxed{{{_number(item)}1}}", f"It is {_number(item)}."])


def _asked(item: Item) -> str:
    return " ".join(str(item["question"]).split())


def _number(item: Item) -> str:
    """What stands behind #### in the data set's answers."""
    return str(item["answer"]).rpartition("####")[2].strip().replace(",", "")


def _steps(item: Item) -> str:
    return str(item["answer"]).partition("####")[0].strip()


def _turns(item: Item) -> list[tuple[str, str]]:
    return [("user", str(item["question"])), ("assistant", f"{_steps(item)} \\boxed{{{_number(item)}}}")]


if __name__ == "__main__":
    Gsm8kEnv.cli()
