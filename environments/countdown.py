"""Countdown: make a number out of others with + - * /. Many answers are right and no list has them: a program checks one."""

import ast
import operator
import random
from collections import Counter
from collections.abc import Callable, Iterable
from fractions import Fraction

from pydantic import Field

from lachesis.environment import Item, Outcome, TaskEnv, TaskEnvConfig, zero

OPERATIONS: dict[type, Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
SIGNS = "+-*/"
MOST_CHARACTERS = 200
FORM = 0.1
"""Of the reward, for an expression of the right numbers, whatever its value is."""


class CountdownConfig(TaskEnvConfig):
    max_answer_tokens: int = Field(32, ge=4, le=4096, description="Most tokens of one answer")
    puzzles: int = Field(500, ge=2, le=100_000, description="Different puzzles")
    numbers: int = Field(2, ge=2, le=6, description="Numbers to be used, each once")
    largest: int = Field(9, ge=1, le=100, description="Numbers from 1 to this")


class WrongForm(Exception):
    """The answer is no expression of the numbers. The text is what it is counted as."""


class CountdownEnv(TaskEnv):
    """Reach a target with each of the numbers once and + - * /: 0.1 for the form, 0.9 for the value."""

    name = "countdown"
    env_config_cls = CountdownConfig
    config: CountdownConfig

    def load_dataset(self) -> Iterable[Item]:
        draw, config = random.Random("countdown"), self.config
        found: dict[str, Item] = {}
        for _ in range(20 * config.puzzles):  # small settings have fewer puzzles than were asked for
            numbers = [draw.randint(1, config.largest) for _ in range(config.numbers)]
            expression = _expression(draw, numbers)
            target = value(expression)
            if target is not None and target.denominator == 1 and target >= 0:
                question = f"{' '.join(map(str, sorted(numbers)))} make {target}:"
                item = {"question": question, "numbers": sorted(numbers), "target": int(target), "solution": expression}
                found.setdefault(question, item)
            if len(found) == config.puzzles:
                break
        return found.values()

    def score_answer(self, item: Item, answer: str) -> Outcome | dict[str, float]:
        try:
            reached = checked(answer, item["numbers"])
        except WrongForm as error:
            return zero(str(error))
        return {"form": FORM, "value": (1 - FORM) * (reached == item["target"])}

    def gold(self, item: Item) -> str:
        return str(item["solution"])

    def corrupt(self, item: Item) -> str:
        wrong = [one for sign in SIGNS if value(one := sign.join(map(str, item["numbers"]))) != item["target"]]
        return random.choice(wrong)


def checked(answer: str, numbers: list[int]) -> Fraction | None:
    """The value of an answer that uses each number once; None when it divides by zero. Raises WrongForm."""
    text = answer.strip()
    if len(text) > MOST_CHARACTERS:
        raise WrongForm("the answer is longer than any expression")
    try:
        tree = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise WrongForm("the answer is no expression") from error
    used = Counter(one.value for one in ast.walk(tree) if isinstance(one, ast.Constant))
    if used != Counter(numbers):
        raise WrongForm("the answer does not use each number once")
    return _evaluated(tree)


def value(expression: str) -> Fraction | None:
    """Of an expression; None when it divides by zero. Raises WrongForm when it is none."""
    return _evaluated(ast.parse(expression, mode="eval").body)


def _evaluated(node: ast.expr) -> Fraction | None:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return Fraction(node.value)
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
        left, right = _evaluated(node.left), _evaluated(node.right)
        if left is None or right is None or (isinstance(node.op, ast.Div) and right == 0):
            return None
        return OPERATIONS[type(node.op)](left, right)
    raise WrongForm("the answer holds something that is no number and none of + - * /")


def _expression(draw: random.Random, numbers: list[int]) -> str:
    """The numbers in some order with signs between them, read from the left."""
    order = draw.sample(numbers, len(numbers))
    text = str(order[0])
    for number in order[1:]:
        text = f"({text})" if len(text) > 1 and not text.isdigit() else text
        text = f"{text}{draw.choice(SIGNS)}{number}"
    return text


if __name__ == "__main__":
    CountdownEnv.cli()
