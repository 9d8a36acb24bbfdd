"""Find what a launch needs on this machine: its base model, and examples for supervised
fine-tuning.

On the embedded profile the default is a tiny model that was taught the format of the environment's
answers: for `arithmetic` the one that knows sums, for another environment the newest that `lachesis
model build --for ENVIRONMENT` has made.
"""

import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from lachesis.base import paths
from lachesis.base.errors import (
    ConfigError,
    FieldValueError,
    MissingDependencyError,
    ModelNotFoundError,
    shorten,
)
from lachesis.checkpoints.start_from_checkpoint import ForkSource
from lachesis.config.launch_spec import LaunchSpec
from lachesis.config.profiles import (
    check_embedded,
    check_endpoint,
    check_profile,
    has_endpoint_key,
    list_missing_keys,
    list_missing_modules,
)
from lachesis.config.run_config import RunConfig
from lachesis.environment_catalog.lookup import get_name_or_file
from lachesis.inference_tests.store import DEFAULT_MODELS, EMBEDDED, TINKER, make_tested_name
from lachesis.models.find_model import require_model
from lachesis.tiny_model import build as tiny_model_build

# The keys that `lachesis serve` has, as names with the value "set", or None without one.
KeyNames = Mapping[str, str] | None
# The module that each experiment tracker needs.
TRACKER_MODULES = {"wandb": "wandb", "tensorboard": "tensorboardX", "trackio": "trackio"}
# The name by which users select the tiny model that knows sums.
TINY_MODEL = "tiny"
TINY_MODEL_ENVIRONMENTS = frozenset({"arithmetic"})


def find_base_model(
    spec: LaunchSpec,
    environment: str,
    others: Iterable[str],
    *,
    fork_source: ForkSource | None,
    home: Path,
) -> str | None:
    """Return the base model of a launch, or None for the profile's own.

    Args:
        spec: What the user wants.
        environment: The name of the environment.
        others: The names of the further environments.
        fork_source: The checkpoint that it starts from, whose base model is the default.
        home: The home folder, where models are kept.
    """
    if spec.model is not None:
        return resolve_model(spec.model, home)
    if fork_source:
        return fork_source.config.openai.model_name
    if spec.profile != "embedded":
        return None
    return str(find_taught_model([environment, *others], home) or get_default_tiny_model_path(home))


def resolve_model(name: str, home: Path) -> str:
    """Return the folder or the name on the Hub of a model that a user named.

    The prefix `embedded:` is removed, because the engine of this machine serves the model in any
    case.

    Raises:
        ModelNotFoundError: The folder is not a model.
    """
    name = name.removeprefix(EMBEDDED)
    if name == TINY_MODEL:
        return str(get_default_tiny_model_path(home))
    try:
        folder = Path(name).expanduser()
    except RuntimeError as error:
        raise ModelNotFoundError(f"{shorten(name)} is not a folder: {error}") from error
    if folder == get_default_tiny_model_path(home):
        return name  # It is built when it is first needed.
    if not folder.exists() and not name.startswith(("/", ".", "~")):
        return name
    if not (folder / "config.json").is_file():
        problem = f"{shorten(str(folder))} is not a model (it has no config.json)"
        raise ModelNotFoundError(f"{problem}; `lachesis model build` makes a tiny one")
    return str(folder.resolve())


def get_default_tiny_model_path(home: Path) -> Path:
    """Return the folder of the tiny model that knows sums, which may still have to be built."""
    return tiny_model_build.get_tiny_model_path(tiny_model_build.TinyModelRecipe(), home)


def find_taught_model(environments: Sequence[str], home: Path) -> Path | None:
    """Return the newest model that was taught on exactly these environments, or None.

    For `arithmetic` it is always None, because the model that knows sums is the default.
    """
    if suits_tiny_model(environments):
        return None
    digits = "[0-9a-f]" * tiny_model_build.DIGEST_DIGITS
    folders = [
        folder
        for folder in paths.models_dir(home).glob(f"tiny-*-{digits}")
        if is_taught_on(folder, environments) and (folder / "config.json").is_file()
    ]
    return max(folders, key=lambda folder: folder.stat().st_mtime, default=None)


def is_taught_on(model: Path, environments: Sequence[str]) -> bool:
    """Return whether a model's folder says that it was taught on exactly these environments."""
    return model.name[: -tiny_model_build.DIGEST_DIGITS] == f"tiny-{'-'.join(environments)}-"


def suits_tiny_model(environments: Sequence[str]) -> bool:
    """Return whether the tiny model that knows sums has nothing more to be taught."""
    return set(environments) <= TINY_MODEL_ENVIRONMENTS


def find_model_problem(spec: LaunchSpec, config: RunConfig, home: Path) -> str | None:
    """Return why this launch's model should not be trained, or None.

    The default model would stay at reward 0 unless it was taught the format of the answers.
    """
    environments = list(config.build_environment_configs())
    if spec.profile != "embedded" or spec.model or spec.from_checkpoint:
        return None
    if suits_tiny_model(environments) or find_taught_model(environments, home):
        return None
    words = [get_name_or_file(name) for name in environments]
    options = [part for word in words for part in ("--for", word)]
    build_command = shlex.join(["lachesis", "model", "build", *options])
    return (
        "no model is named, and the tiny model knows sums only: it would stay at reward 0 on "
        f"{' and '.join(environments)}. `{build_command}` teaches a tiny model, which is then the "
        "default; --model FOLDER_OR_NAME (`model` of rl_select_environment) selects any other one, "
        f"and --model {TINY_MODEL} the model of sums anyway"
    )


def describe_default_model(spec: LaunchSpec, model: str) -> str | None:
    """Say which taught model is the default; None for sums and for a named model."""
    folder = Path(model)
    if (
        spec.profile != "embedded"
        or spec.model
        or spec.from_checkpoint
        or folder.name.count("-") < 2
    ):
        return None
    taught_on = folder.name[5 : -tiny_model_build.DIGEST_DIGITS - 1]
    return f"no model is named, so the one taught on {taught_on} is used: {model}"


def require_loadable_model(model: str, home: Path, *, profile: str = "embedded") -> None:
    """Raise ModelNotFoundError for a model that cannot be loaded here; the tiny one is built when
    needed.

    If training happens elsewhere, only the tokenizer is loaded here.
    """
    if Path(model) != get_default_tiny_model_path(home):
        require_model(model, needs_weights=profile == "embedded")


def require_trackers(config: RunConfig) -> None:
    """Raise MissingDependencyError for an experiment tracker whose package is not installed."""
    modules = {name: TRACKER_MODULES[name] for name in config.tinker.tracker_names}
    missing = list_missing_modules(modules.values())
    for name, module in modules.items():
        if module in missing:
            raise MissingDependencyError(
                f"the tracker {name} needs {module}, which is not installed: pip install "
                f"'lachesis-rl[trackers]'; or leave it out of tinker.trackers"
            )


def resolve_tested_model(name: str, home: Path) -> str:
    """Return the name of a model in a test.

    Raises:
        ModelNotFoundError: A model of this machine cannot be loaded.
    """
    if name.startswith(TINKER):
        require_loadable_model(name.removeprefix(TINKER), home, profile="tinker")
        return name
    if not name.startswith(EMBEDDED):
        return name
    resolved_name = resolve_model(name, home)
    require_loadable_model(resolved_name, home)
    return f"{EMBEDDED}{resolved_name}"


def list_default_tested_models(profile: str, config: RunConfig, key_names: KeyNames) -> list[str]:
    """Return the model to train, or the endpoint's default models if only they have a key."""
    # An agent with a key of OpenRouter alone could test before Tinker was asked.
    if list_missing_keys(profile, key_names) and has_endpoint_key(key_names):
        return [name for name, _, _ in DEFAULT_MODELS]
    return [make_tested_name(config.openai.model_name, profile)]


def check_tested_places(profile: str, model_names: list[str], key_names: KeyNames) -> None:
    """Check that each model of a test can be sampled at its place.

    Raises:
        LachesisError: A package or a key is missing, or the profile has no Tinker server.
    """
    if any(name.startswith(EMBEDDED) for name in model_names):
        check_embedded()
    if tinker_models := [name for name in model_names if name.startswith(TINKER)]:
        if profile == "embedded":
            raise ConfigError(
                f"{tinker_models[0]} is sampled by a Tinker server, and profile embedded has none; "
                "allowed: profile tinker or custom, or embedded:NAME"
            )
        check_profile(profile, key_names)
    if endpoint_models := [name for name in model_names if not name.startswith((EMBEDDED, TINKER))]:
        check_endpoint(endpoint_models, key_names)


def resolve_examples_file(text: str) -> Path:
    """Return the absolute path of a file of examples, because the trainer runs in another folder.

    Raises:
        FieldValueError: The file cannot be read.
    """
    try:
        file = Path(text).expanduser().resolve()
        with file.open("rb"):
            return file
    except (OSError, RuntimeError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise FieldValueError(
            f"tinker.sft_file is {shorten(repr(text))}: {reason}; allowed: a readable JSONL "
            "file, or null"
        ) from error
