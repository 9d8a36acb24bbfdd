"""Solve grade-school word problems (Cobbe et al. 2021, arXiv:2110.14168); answer in \\boxed{}."""

import logging
import random
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from math_verify import LatexExtractionConfig, parse, verify
from pydantic import Field

from lachesis.environment import Item, Outcome, Rollout, TaskEnv, TaskEnvConfig, rows, zero

SYSTEM_PROMPT = "Solve the problem step by step, and put the final number in \\boxed{}."
BOXED_EXTRACTION = [LatexExtractionConfig(boxed_match_priority=0, try_extract_without_anchor=False)]
EXPENSIVE_EXPRESSION = re.compile(r"\^|\*\*|!|\\(?:uparrow|binom|prod|sum|int|Gamma)")
"""Operations that no right answer needs and that could keep a computer busy for years."""
MAX_CHARACTERS = 100
# The library warns at each call that it does not limit the time.
logging.getLogger("math_verify").setLevel(logging.ERROR)


class Gsm8kConfig(TaskEnvConfig):
    system_prompt: str | None = Field(
        SYSTEM_PROMPT, description="System message before each question"
    )
    max_answer_tokens: int = Field(
        512, ge=8, le=131_072, description="Maximum tokens of one answer"
    )
    dataset: str = Field(
        "openai/gsm8k",
        description="Data set of Hugging Face, or a JSONL file with `question` and `answer`",
    )
    held_out_dataset: str | None = Field(
        None, description="JSONL file to evaluate on; by default a part of `dataset` is held out"
    )
    few_shot: int = Field(
        0, ge=0, le=32, description="Solved problems before each question, never trained on"
    )
    length_penalty: float = Field(
        0.0, ge=0, le=1, description="Share of the reward that a right answer of full length loses"
    )


class Gsm8kEnv(TaskEnv):
    """Solve grade-school word problems: 1 for the right number in \\boxed{}."""

    name = "gsm8k"
    env_config_cls = Gsm8kConfig
    config: Gsm8kConfig
    solved = 1e-9

    def load_dataset(self) -> Iterable[Item] | Mapping[str, Iterable[Item]]:
        config, needed = self.config, ("question", "answer")
        is_local = Path(config.dataset).suffix in (".jsonl", ".json", ".ndjson")
        train = rows(config.dataset, needed=needed, subset=None if is_local else "main")
        if config.held_out_dataset:
            held_out = rows(config.held_out_dataset, needed=needed)
        else:
            held_out = (
                [] if is_local else rows(config.dataset, needed=needed, subset="main", split="test")
            )
        held_out_questions = {_normalize_question(item) for item in held_out}
        self.few_shot_items = [
            item for item in train if _normalize_question(item) not in held_out_questions
        ][: config.few_shot]
        few_shot_questions = {_normalize_question(shot) for shot in self.few_shot_items}
        train = [item for item in train if _normalize_question(item) not in few_shot_questions]
        return {"train": train, "held_out": held_out} if held_out else train

    def prompt(self, item: Item) -> list[dict[str, Any]]:
        few_shot_messages = [
            {"role": role, "content": text}
            for shot in self.few_shot_items
            for role, text in _build_turns(shot)
        ]
        return [*few_shot_messages, {"role": "user", "content": item["question"]}]

    def identity(self, item: Item) -> str:
        return str(item["question"])

    def score_rollout(self, item: Item, rollout: Rollout) -> float | Outcome:
        score = self.score_answer(item, rollout.answer)
        if not isinstance(score, float) or score == 0:
            return score
        return score * (
            1 - self.config.length_penalty * rollout.sampled_tokens / self.config.max_answer_tokens
        )

    def score_answer(self, item: Item, answer: str) -> float | Outcome:
        boxed = answer.rpartition("\\boxed")[2] if "\\boxed" in answer else ""
        if not boxed:
            return zero("no number in \\boxed{}")
        if EXPENSIVE_EXPRESSION.search(boxed[:MAX_CHARACTERS]):
            return zero("something in \\boxed{} that is not a number")
        parsed = parse(f"\\boxed{boxed[:MAX_CHARACTERS]}", BOXED_EXTRACTION, parsing_timeout=None)
        return float(
            verify(parse(_read_number(item), parsing_timeout=None), parsed, timeout_seconds=None)
        )

    def gold(self, item: Item) -> str:
        return f"{_read_solution(item)} \\boxed{{{_read_number(item)}}}"

    def corrupt(self, item: Item) -> str:
        return random.choice([f"\\boxed{{{_read_number(item)}1}}", f"It is {_read_number(item)}."])


def _normalize_question(item: Item) -> str:
    return " ".join(str(item["question"]).split())


def _read_number(item: Item) -> str:
    """Return the number after #### in the data set's answers."""
    return str(item["answer"]).rpartition("####")[2].strip().replace(",", "")


def _read_solution(item: Item) -> str:
    return str(item["answer"]).partition("####")[0].strip()


def _build_turns(item: Item) -> list[tuple[str, str]]:
    return [
        ("user", str(item["question"])),
        ("assistant", f"{_read_solution(item)} \\boxed{{{_read_number(item)}}}"),
    ]


if __name__ == "__main__":
    Gsm8kEnv.cli()
