"""Train with a function `reward(prompt, completion)` and a file of prompts.

    lachesis train reward_function --set function=$PWD/mine.py:reward \\
        --set dataset=$PWD/prompts.jsonl

Each row has a `prompt`, a text or messages. A function that takes arguments named like other fields
of the row gets their values.
"""

import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from pydantic import Field

from lachesis.environment import DatasetError, Item, TaskEnv, TaskEnvConfig, rows


class RewardFunctionConfig(TaskEnvConfig):
    function: str = Field(
        "",
        description="/…/FILE.py:NAME of a function of `prompt` and `completion` that returns a "
        "number",
    )
    dataset: str = Field(
        "", description="JSONL file or data set of Hugging Face whose rows have a `prompt`"
    )
    solved_at: float = Field(1.0, description="Minimum reward of a solution")


class RewardFunctionEnv(TaskEnv):
    """Score prompts from a file with your own function reward(prompt, completion)."""

    name = "reward_function"
    env_config_cls = RewardFunctionConfig
    config: RewardFunctionConfig

    def load_dataset(self) -> Iterable[Item]:
        self.solved = self.config.solved_at
        self.reward_function = load_reward_function(self.config.function)
        if not self.config.dataset:
            raise DatasetError(
                "the field `dataset` is empty; needed: a JSONL file of rows with a `prompt`"
            )
        return rows(self.config.dataset, needed=("prompt",))

    def prompt(self, item: Item) -> str | list[dict[str, Any]]:
        return item["prompt"] if isinstance(item["prompt"], list) else str(item["prompt"])

    def score_answer(self, item: Item, answer: str) -> Any:
        arguments = {**item, "prompt": item["prompt"], "completion": answer}
        parameters = inspect.signature(self.reward_function).parameters
        has_kwargs = any(
            parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()
        )
        return self.reward_function(
            **{name: value for name, value in arguments.items() if has_kwargs or name in parameters}
        )


def load_reward_function(location: str) -> Callable[..., Any]:
    """Return the function at FILE.py:NAME.

    Raises:
        DatasetError: There is no such function.
    """
    file, _, name = location.rpartition(":")
    path = Path(file).expanduser()
    if (
        not name.isidentifier()
        or path.suffix != ".py"
        or not path.is_absolute()
        or not path.is_file()
    ):
        raise DatasetError(
            f"the field function is {location!r}; needed: /…/FILE.py:NAME, the absolute path of an "
            "existing file"
        )
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None  # noqa: PT018
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # Dataclasses look up the types of their fields here.
    sys.path.append(str(path.parent))  # The file may import its neighbours.
    spec.loader.exec_module(module)
    function = getattr(module, name, None)
    if not callable(function):
        raise DatasetError(f"{path} has no function {name!r}")
    return function


if __name__ == "__main__":
    RewardFunctionEnv.cli()
