"""Make a number out of others with + - * /.

Many answers are right, so a program checks the answer instead of a list.
"""

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
OPERATORS = "+-*/"
MAX_CHARACTERS = 200
FORM_REWARD = 0.1
"""Part of the reward for an expression of the right numbers, whatever its value."""


class CountdownConfig(TaskEnvConfig):
    max_answer_tokens: int = Field(32, ge=4, le=4096, description="Maximum tokens of one answer")
    puzzles: int = Field(500, ge=2, le=100_000, description="Number of puzzles")
    numbers: int = Field(2, ge=2, le=6, description="Numbers per puzzle, each to be used once")
    largest: int = Field(9, ge=1, le=100, description="Largest of those numbers")


class WrongForm(Exception):
    """The answer is not an expression of the numbers; answers are counted by the text."""


class CountdownEnv(TaskEnv):
    """Reach a target with each number once and + - * /: 0.1 for the form, 0.9 for the value."""

    name = "countdown"
    env_config_cls = CountdownConfig
    config: CountdownConfig

    def load_dataset(self) -> Iterable[Item]:
        rng, config = random.Random("countdown"), self.config
        items_by_question: dict[str, Item] = {}
        # With small numbers there may be fewer puzzles than requested.
        for _ in range(20 * config.puzzles):
            numbers = [rng.randint(1, config.largest) for _ in range(config.numbers)]
            expression = _draw_expression(rng, numbers)
            target = evaluate_expression(expression)
            if target is not None and target.denominator == 1 and target >= 0:
                question = f"{' '.join(map(str, sorted(numbers)))} make {target}:"
                item = {
                    "question": question,
                    "numbers": sorted(numbers),
                    "target": int(target),
                    "solution": expression,
                }
                items_by_question.setdefault(question, item)
            if len(items_by_question) == config.puzzles:
                break
        return items_by_question.values()

    def score_answer(self, item: Item, answer: str) -> Outcome | dict[str, float]:
        try:
            result = evaluate_answer(answer, item["numbers"])
        except WrongForm as error:
            return zero(str(error))
        return {"form": FORM_REWARD, "value": (1 - FORM_REWARD) * (result == item["target"])}

    def gold(self, item: Item) -> str:
        return str(item["solution"])

    def corrupt(self, item: Item) -> str:
        wrong = [
            expression
            for operator_sign in OPERATORS
            if evaluate_expression(expression := operator_sign.join(map(str, item["numbers"])))
            != item["target"]
        ]
        return random.choice(wrong)


def evaluate_answer(answer: str, numbers: list[int]) -> Fraction | None:
    """Return the value of an answer that uses each number once, or None if it divides by zero.

    Raises:
        WrongForm: The answer is not such an expression.
    """
    text = answer.strip()
    if len(text) > MAX_CHARACTERS:
        raise WrongForm("the answer is longer than any expression")
    try:
        tree = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise WrongForm("the answer is not an expression") from error
    used_numbers = Counter(node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))
    if used_numbers != Counter(numbers):
        raise WrongForm("the answer does not use each number once")
    return _evaluate_node(tree)


def evaluate_expression(expression: str) -> Fraction | None:
    """Return the value of an expression, or None if it divides by zero.

    Raises:
        WrongForm: The expression contains something other than numbers and + - * /.
    """
    return _evaluate_node(ast.parse(expression, mode="eval").body)


def _evaluate_node(node: ast.expr) -> Fraction | None:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return Fraction(node.value)
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
        left_value, right_value = _evaluate_node(node.left), _evaluate_node(node.right)
        if (
            left_value is None
            or right_value is None
            or (isinstance(node.op, ast.Div) and right_value == 0)
        ):
            return None
        return OPERATIONS[type(node.op)](left_value, right_value)
    raise WrongForm("the answer contains something other than numbers and + - * /")


def _draw_expression(rng: random.Random, numbers: list[int]) -> str:
    """Return the numbers in random order with random operators, evaluated from the left."""
    order = rng.sample(numbers, len(numbers))
    text = str(order[0])
    for number in order[1:]:
        text = f"({text})" if len(text) > 1 and not text.isdigit() else text
        text = f"{text}{rng.choice(OPERATORS)}{number}"
    return text


if __name__ == "__main__":
    CountdownEnv.cli()
