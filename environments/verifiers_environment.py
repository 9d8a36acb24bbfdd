# /// script
# dependencies = ["verifiers>=0.1.14,<0.3"]
# ///
"""An environment written for `verifiers`, trained on as it is.

lachesis env install verifiers_environment lachesis train verifiers_environment --set
environment=$PWD/wordle.py --set 'arguments={"words": 100}'

One that is a package of its own is named in the header of a file of yours, which inherits from
VerifiersEnv.
"""

import sys
from pathlib import Path
from typing import Any

import verifiers as vf
from pydantic import Field

from lachesis.environment import DatasetError, TaskEnvConfig
from lachesis.environment.verifiers_adapter import VerifiersEnv


class VerifiersEnvironmentConfig(TaskEnvConfig):
    environment: str = Field(
        "",
        description="/…/FILE.py, or the name of an installed module, that has load_environment()",
    )
    arguments: dict[str, Any] = Field({}, description="Of load_environment()")
    solved_at: float = Field(1.0, description="A reward of at least this counts as a solution")


class VerifiersEnvironment(VerifiersEnv):
    """A file or a package with `load_environment()`, as `verifiers` has them."""

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
                    f"the field environment is {name!r}; needed: the whole path of a file that is there"
                )
            sys.path.insert(0, str(file.parent))
            name = file.stem
        if not name:
            raise DatasetError(
                "the field environment names nothing; needed: a file, or a module that has load_environment()"
            )
        return vf.load_environment(name, **self.config.arguments)


if __name__ == "__main__":
    VerifiersEnvironment.cli()
