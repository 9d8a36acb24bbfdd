# /// script
# dependencies = ["verifiers>=0.1.14,<0.3"]
# ///
"""Train on an environment written for the package `verifiers` without changing it.

    lachesis env install verifiers_environment
    lachesis train verifiers_environment --set environment=$PWD/wordle.py \\
        --set 'arguments={"words": 100}'

For an environment in a package, write a file with a class that inherits from VerifiersEnv and name
the package in its header.
"""

import sys
from pathlib import Path
from typing import Any

import verifiers as vf
from pydantic import Field

from lachesis.environment import DatasetError, TaskEnvConfig, VerifiersEnv


class VerifiersEnvironmentConfig(TaskEnvConfig):
    environment: str = Field(
        "", description="/…/FILE.py or the name of an installed module with load_environment()"
    )
    arguments: dict[str, Any] = Field({}, description="Arguments of load_environment()")
    solved_at: float = Field(1.0, description="Minimum reward of a solution")


class VerifiersEnvironment(VerifiersEnv):
    """Run a file or a package with `load_environment()`, as `verifiers` defines it."""

    name = "verifiers_environment"
    env_config_cls = VerifiersEnvironmentConfig
    config: VerifiersEnvironmentConfig

    def load_environment(self) -> Any:
        self.solved = self.config.solved_at
        name = self.config.environment
        if name.endswith(".py"):
            file = Path(name).expanduser()
            if not file.is_absolute() or not file.is_file():
                raise DatasetError(
                    f"the field environment is {name!r}; needed: the absolute path of an existing "
                    f"file"
                )
            sys.path.insert(0, str(file.parent))
            name = file.stem
        if not name:
            raise DatasetError(
                "the field environment is empty; needed: a file or a module with load_environment()"
            )
        return vf.load_environment(name, **self.config.arguments)


if __name__ == "__main__":
    VerifiersEnvironment.cli()
