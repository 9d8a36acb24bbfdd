"""What a launch takes from this machine: its base model, and examples to imitate first.

On the embedded profile the default is a tiny model that was taught the form of the environment's
answers: of `arithmetic` the one that knows sums, of another environment the newest that `lachesis
model build --for ENVIRONMENT` has made.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lachesis.base import paths
from lachesis.base.errors import FieldValueError, ModelNotFoundError, shorten
from lachesis.base.model_files import require_model
from lachesis.catalog.describe import EnvironmentSchema, get_name_or_file
from lachesis.config.edits import ConfigFields
from lachesis.config.run_config import RunConfig
from lachesis.runs.fork import ForkSource
from lachesis.tiny_model import build as tiny_model_build
from lachesis.validation.inference_tests import EMBEDDED

TINY_MODEL = "tiny"
"""The name of the tiny model that knows sums, where a model is named."""
TINY_MODEL_ENVIRONMENTS = frozenset({"arithmetic"})


@dataclass(frozen=True)
class LaunchRequest:
    """What somebody wants to train or to test."""

    environment: str
    profile: str = "embedded"
    edits: tuple[tuple[str, Any], ...] = ()
    model: str | None = None
    seed: int | None = None
    require_validation: bool = False
    start_from: str | None = None
    """RUN or RUN@STEP, the checkpoint that the run begins from; see `lachesis.runs.fork`."""
    by_owner: bool = False
    """Whether the owner of this machine asks, who may also set the fields that are locked for
    agents.
    """

    def fields(self, schema: EnvironmentSchema) -> ConfigFields:
        """Return the fields of the environment as whoever asks may edit them."""
        return ConfigFields(self.profile, schema, is_owner=self.by_owner)


def find_base_model(
    launch: LaunchRequest, others: Iterable[str], origin: ForkSource | None, home: Path
) -> str | None:
    """Return the base model of a launch, or None where the profile's own is taken.

    Args:
        launch: What somebody wants.
        others: The names of the environments beside the first one.
        origin: The checkpoint that it begins from, whose base model is the default.
        home: Where models are kept.
    """
    if launch.model is not None:
        return resolve_model(launch.model, home)
    if origin:
        return origin.config.openai.model_name
    if launch.profile != "embedded":
        return None
    return str(
        find_taught_model([launch.environment, *others], home) or get_default_tiny_model_path(home)
    )


def resolve_model(name: str, home: Path) -> str:
    """Return the folder, or the name on the Hub, of the model that somebody named.

    `embedded:` before a name is left out: it is served by the engine of this machine in any case.
    Raises ModelNotFoundError for a folder that holds no model.
    """
    name = name.removeprefix(EMBEDDED)
    if name == TINY_MODEL:
        return str(get_default_tiny_model_path(home))
    try:
        folder = Path(name).expanduser()
    except RuntimeError as error:
        raise ModelNotFoundError(f"{shorten(name)} names no folder: {error}") from error
    if folder == get_default_tiny_model_path(home):
        return name  # built by whoever needs it first
    if not folder.exists() and not name.startswith(("/", ".", "~")):
        return name
    if not (folder / "config.json").is_file():
        problem = f"{shorten(str(folder))} holds no model (no config.json there)"
        raise ModelNotFoundError(f"{problem}; `lachesis model build` makes a tiny one")
    return str(folder.resolve())


def get_default_tiny_model_path(home: Path) -> Path:
    """Return the folder of the tiny model that knows sums, which may still have to be built."""
    return tiny_model_build.get_tiny_model_path(tiny_model_build.TinyModelRecipe(), home)


def find_taught_model(environments: Sequence[str], home: Path) -> Path | None:
    """Return the newest model that was taught on exactly these environments, or None.

    Of `arithmetic` it is always None: the model that knows sums is its default.
    """
    if _suits_tiny_model(environments):
        return None
    prefix = f"tiny-{'-'.join(environments)}-"
    digits = "[0-9a-f]" * tiny_model_build.DIGEST_DIGITS
    folders = [
        folder
        for folder in paths.models_dir(home).glob(f"tiny-*-{digits}")
        if folder.name[: -tiny_model_build.DIGEST_DIGITS] == prefix
        and (folder / "config.json").is_file()
    ]
    return max(folders, key=lambda folder: folder.stat().st_mtime, default=None)


def _suits_tiny_model(environments: Sequence[str]) -> bool:
    return set(environments) <= TINY_MODEL_ENVIRONMENTS


def find_model_problem(launch: LaunchRequest, config: RunConfig, home: Path) -> str | None:
    """Return why nobody should train this launch's model, or None.

    The default model would stay at reward 0 to the last step where it was not taught the form of
    the answers.
    """
    environments = list(config.build_environment_configs())
    if launch.profile != "embedded" or launch.model or launch.start_from:
        return None
    if _suits_tiny_model(environments) or find_taught_model(environments, home):
        return None
    words = [get_name_or_file(name) for name in environments]
    options = [part for word in words for part in ("--for", word)]
    build_command = shlex.join(["lachesis", "model", "build", *options])
    return (
        f"no model is named, and the tiny model knows sums only: it would stay at reward 0 on {' and '.join(environments)}. "
        f"`{build_command}` teaches a tiny model, which is the default from then on; --model FOLDER_OR_NAME (`model` of "
        f"rl_select_environment) takes any other one, and --model {TINY_MODEL} the model of sums all the same"
    )


def describe_default_model(launch: LaunchRequest, model: str) -> str | None:
    """Say which model is taken where nobody named one; None for the model of sums and for a model
    that was named.
    """
    folder = Path(model)
    if (
        launch.profile != "embedded"
        or launch.model
        or launch.start_from
        or folder.name.count("-") < 2
    ):
        return None
    return f"nobody named a model, so the one taught on {folder.name[5 : -tiny_model_build.DIGEST_DIGITS - 1]} is taken: {model}"


def require_loadable_model(model: str, home: Path, *, profile: str = "embedded") -> None:
    """Raise ModelNotFoundError for a model that cannot be loaded here; the tiny one is built when
    it is needed.

    Where training happens elsewhere only its tokenizer is loaded here.
    """
    if Path(model) != get_default_tiny_model_path(home):
        require_model(model, needs_weights=profile == "embedded")


def resolve_tested_model(name: str, home: Path) -> str:
    """Return the name by which a test knows a model.

    Raises ModelNotFoundError for one of this machine that cannot be loaded.
    """
    if not name.startswith(EMBEDDED):
        return name
    resolved_name = resolve_model(name, home)
    require_loadable_model(resolved_name, home)
    return f"{EMBEDDED}{resolved_name}"


def resolve_examples_file(text: str) -> Path:
    """Return the whole path of a file of examples, because the trainer runs in another folder.

    Raises FieldValueError when it cannot be read.
    """
    try:
        file = Path(text).expanduser().resolve()
        with file.open("rb"):
            return file
    except (OSError, RuntimeError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise FieldValueError(
            f"tinker.supervised_file is {shorten(repr(text))}: {reason}; allowed: a JSONL file that can be read, or null"
        ) from error
