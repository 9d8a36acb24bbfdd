"""Write a function from its description; the answer is checked by running it on inputs.

The model's code runs in a sandbox, and the right results never enter it, because code that knew
them could print them.
"""

import json
import random
import re
from collections.abc import Callable, Iterable
from typing import Any

from pydantic import Field

from lachesis.environment import Item, Limits, Outcome, Sandbox, TaskEnv, TaskEnvConfig, zero

KINDS: dict[str, tuple[str, Callable[[int, int], int]]] = {
    "plus": ("x+{k}", lambda x, k: x + k),
    "minus": ("x-{k}", lambda x, k: x - k),
    "times": ("x*{k}", lambda x, k: x * k),
    "modulo": ("x%{k}", lambda x, k: x % k),
}
INPUTS = (-7, 0, 1, 5, 12, 100)
RUNS_REWARD = 0.2
"""Part of the reward for code that answers each call without an error; the rest is for right
answers.
"""
CODE_BLOCK_PATTERN = re.compile(r"```(?:python)?\n(.*?)```", re.DOTALL)
HARNESS = """
import json, sys
given = json.load(sys.stdin)
names = {}
exec(compile(given["source"], "answer", "exec"), names)
results = []
for inputs in given["calls"]:
    try:
        results.append({"value": names["f"](*inputs)})
    except Exception as error:
        results.append({"error": type(error).__name__})
sys.stdout.write("\\n" + json.dumps(results, default=repr))
"""


class CodeUnitTestsConfig(TaskEnvConfig):
    max_answer_tokens: int = Field(40, ge=8, le=4096, description="Maximum tokens of one answer")
    largest: int = Field(20, ge=2, le=10_000, description="Largest number in the functions")
    seconds: float = Field(2.0, gt=0, le=60, description="Maximum seconds of one program")
    memory_mib: int = Field(
        256, ge=64, le=65_536, description="Maximum memory of one program in MiB"
    )


class CodeUnitTestsEnv(TaskEnv):
    """Write a Python function f(x): 0.2 if it runs, and 0.8 times the share of right results."""

    name = "code_unit_tests"
    env_config_cls = CodeUnitTestsConfig
    config: CodeUnitTestsConfig

    async def setup(self) -> None:
        await super().setup()
        self.sandbox = Sandbox(Limits(self.config.seconds, self.config.memory_mib))

    def load_dataset(self) -> Iterable[Item]:
        return [
            {
                "question": f"f(x): x {word} {k}",
                "kind": word,
                "k": k,
                "results": [compute(x, k) for x in INPUTS],
            }
            for word, (_, compute) in KINDS.items()
            for k in range(1, self.config.largest + 1)
        ]

    async def score_answer(self, item: Item, answer: str) -> Outcome | dict[str, float]:
        fenced = CODE_BLOCK_PATTERN.search(answer)
        request = {
            "source": fenced[1] if fenced else answer.strip(),
            "calls": [[x] for x in INPUTS],
        }
        sandbox_result = await self.sandbox.run(HARNESS, json.dumps(request))
        if sandbox_result.how != "ended":
            return zero(f"the program: {sandbox_result.how}")
        results = _parse_results(sandbox_result.output)
        if results is None:
            return zero("the program hid its results")
        values = [result.get("value") for result in results]
        num_right = sum(
            type(value) is int and value == expected
            for value, expected in zip(values, item["results"], strict=True)
        )
        has_run_all = all("value" in result for result in results)
        return {
            "runs": RUNS_REWARD * has_run_all,
            "tests": (1 - RUNS_REWARD) * num_right / len(INPUTS),
        }

    def gold(self, item: Item) -> str:
        return f"def f(x): return {KINDS[item['kind']][0].format(k=item['k'])}"

    def corrupt(self, item: Item) -> str:
        other = random.choice([kind for kind in KINDS if kind != item["kind"]])
        return random.choice(
            [
                f"def f(x): return {KINDS[other][0].format(k=item['k'] + 1)}",
                f"def f(x) return {item['k']}",
            ]
        )


def _parse_results(output: str) -> list[dict[str, Any]] | None:
    """Return the results in the last line, or None if the harness did not write that line."""
    try:
        results = json.loads(output.rpartition("\n")[2])
    except (ValueError, RecursionError):
        return None
    is_valid = (
        isinstance(results, list)
        and len(results) == len(INPUTS)
        and all(isinstance(result, dict) for result in results)
    )
    return results if is_valid else None


if __name__ == "__main__":
    CodeUnitTestsEnv.cli()
