"""Find an environment by its name or file, and read its configuration in a child process.

Whatever an environment does while it is imported (crash, hang, print) happens in the child.
"""

import contextlib
import functools
import hashlib
import importlib.metadata
import json
import os
import shlex
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lachesis
from lachesis.base import paths
from lachesis.base.errors import (
    EnvironmentLoadError,
    EnvironmentTimeoutError,
    UnknownEnvironmentError,
    shorten,
)
from lachesis.base.files import storage_errors, write_private
from lachesis.base.formatting import suggest
from lachesis.base.managed_process import MAX_OUTPUT_BYTES, BoundedResult, run_bounded
from lachesis.base.secrets import build_child_env, read_passed_variables, redact
from lachesis.environment_catalog.fingerprint import compute_fingerprint, read_source
from lachesis.environment_catalog.requirements import find_interpreter
from lachesis.environment_catalog.scan import (
    LACHESIS_BASES,
    ROOT_CLASS,
    Environment,
    scan_environments,
)

SCHEMA_TIMEOUT_S = 90.0


@dataclass(frozen=True)
class EnvironmentSchema:
    """Describe the configuration of an environment, as its own class defines it."""

    properties: dict[str, Any]
    """The JSON schema of each field, made by pydantic."""
    definitions: dict[str, Any]
    values: dict[str, Any]
    """The values that `config_init()` returned."""
    checks: bool = False
    """Whether the configuration class has validators of its own, which the schema does not show."""
    warning: str | None = None
    """Why this is the general configuration of Atropos instead of the environment's own, if it is.
    """


def find_environment(name: str, folders: Iterable[Path] | None = None) -> Environment:
    """Return the environment of this name.

    Raises:
        UnknownEnvironmentError: There is none; the message lists the names that exist.
        EnvironmentLoadError: The file of this name does not parse.
    """
    searched = paths.environment_dirs() if folders is None else list(folders)
    result = scan_environments(searched)
    for environment in result.environments:
        if environment.name == name:
            return environment
    for file, reason in result.problems.items():
        if Path(file).stem == name:
            raise EnvironmentLoadError(f"{file} does not parse: {reason}")
    available = [environment.name for environment in result.environments]
    raise UnknownEnvironmentError(
        f"there is no environment {shorten(repr(name), 80)}{suggest(name, available)}; available: "
        f"{', '.join(available) or 'none'} (searched "
        f"{', '.join(map(str, searched)) or 'no folder'}; "
        "LACHESIS_ENVIRONMENTS adds more folders)",
        available=available,
    )


def register_environment(text: str) -> str:
    """Return the name of an environment that a person named by its name or its file.

    A file is added to `$LACHESIS_ENVIRONMENTS` of this process, so that its name is found from now
    on.

    Raises:
        UnknownEnvironmentError: The file does not exist or holds no environment.
        EnvironmentLoadError: The file does not parse.
    """
    if not text.endswith(".py"):
        if Path(f"{text}.py").is_file() and text not in {
            environment.name for environment in scan_environments().environments
        }:
            raise UnknownEnvironmentError(
                f"there is no environment {text!r}; name the file as {text}.py", available=[]
            )
        return text
    file = Path(text).expanduser().resolve()
    if not file.is_file():
        raise UnknownEnvironmentError(f"there is no file {file}", available=[])
    search_paths = os.environ.get("LACHESIS_ENVIRONMENTS", "")
    if str(file) not in search_paths.split(os.pathsep):
        os.environ["LACHESIS_ENVIRONMENTS"] = os.pathsep.join(
            filter(None, (search_paths, str(file)))
        )
    result = scan_environments()
    if str(file) in result.problems:
        raise EnvironmentLoadError(f"{file} does not parse: {result.problems[str(file)]}")
    names = [
        environment.name
        for environment in result.environments
        if environment.file_path == str(file)
    ]
    if not names:
        bases = ", ".join((ROOT_CLASS, *sorted(LACHESIS_BASES)))
        raise UnknownEnvironmentError(
            f"{file} holds no class that inherits from one of {bases}", available=[]
        )
    return names[-1]


def get_name_or_file(name: str, file: str | None = None) -> str:
    """Return the word by which a later command finds this environment: its name, or its file.

    The file is returned when the environment was registered by its file, or is no longer found.
    """
    registered = os.environ.get("LACHESIS_ENVIRONMENTS", "").split(os.pathsep)
    for environment in scan_environments().environments:
        if environment.name == name and file in (None, environment.file_path):
            if environment.file_path in registered:
                return environment.file_path
            return name
    return file or name


def load_schema(environment: Environment, timeout_s: float = SCHEMA_TIMEOUT_S) -> EnvironmentSchema:
    """Return the environment's configuration, read in a child process and cached until the file
    changes.

    Raises:
        EnvironmentLoadError: The import failed; the message ends with the traceback.
        EnvironmentTimeoutError: The import did not end in time.
    """
    cache = _cache_file(environment, "")
    cached = _read_cached_schema(cache)
    if cached is not None:
        return cached
    answer = _run_child("describe", environment, {}, timeout_s)
    result = EnvironmentSchema(**answer["schema"])
    if result.warning is None:
        _write_cache(cache, answer["schema"])
    return result


def _read_cached_schema(cache: Path) -> EnvironmentSchema | None:
    """Return the cached schema, or None when it is missing or damaged."""
    try:
        cached_schema = EnvironmentSchema(**json.loads(cache.read_text()))
    except (OSError, ValueError, TypeError, RecursionError):
        return None
    if isinstance(cached_schema.properties, dict):
        properties = cached_schema.properties.values()
    else:
        properties = [None]
    parts = (cached_schema.definitions, cached_schema.values, *properties)
    if all(isinstance(part, dict) for part in parts):
        return cached_schema
    return None


def check_values(
    environment: Environment,
    schema: EnvironmentSchema,
    values: dict[str, Any],
    timeout_s: float = SCHEMA_TIMEOUT_S,
) -> list[dict[str, str]]:
    """Return the objections of the environment's own configuration class to these values.

    Each has a `message`, and the `field` that is wrong by itself or an empty text. The list is
    empty when the class accepts the values. It is cached until the file changes.
    """
    if not values or not schema.checks:  # Without validators the schema is the whole check.
        return []
    cache = _cache_file(environment, json.dumps(values, sort_keys=True, default=str))
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
        cached_errors: list[dict[str, str]] = json.loads(cache.read_text())["errors"]
        return cached_errors
    errors: list[dict[str, str]] = _run_child(
        "describe", environment, {"values": values}, timeout_s
    )["errors"]
    _write_cache(cache, {"errors": errors})
    return errors


def _cache_file(environment: Environment, request: str) -> Path:
    """Return the cache file of an answer, named after all that the answer depends on."""
    file = Path(environment.file_path)
    key_parts = (
        environment.file_path,
        environment.class_name,
        find_interpreter(file),
        _list_versions(),
        request,
    )
    key = hashlib.sha256(f"{compute_fingerprint(file)} {key_parts!r}".encode()).hexdigest()[:32]
    return paths.home() / "cache" / "schemas" / f"{key}.json"


@functools.cache
def _list_versions() -> tuple[str, ...]:
    """Return the versions that a cached schema depends on: Python's, Atropos's and ours."""
    return (
        sys.version,
        importlib.metadata.version("atroposlib"),
        lachesis.__version__,
        "with checks",
    )


def _write_cache(cache: Path, content: object) -> None:
    with storage_errors(cache.parent):
        cache.parent.mkdir(parents=True, exist_ok=True)
    write_private(cache, json.dumps(content, default=str))


def collect_examples(
    environment: Environment,
    values: dict[str, Any],
    *,
    count: int,
    share: float,
    seed: int = 0,
    timeout_s: float = 600.0,
) -> list[list[dict[str, Any]]]:
    """Return conversations of the environment for warming up a model; `share` of them have a right
    answer.

    Raises:
        EnvironmentLoadError: The environment cannot be imported or cannot make examples.
        EnvironmentTimeoutError: It took longer than `timeout_s`.
    """
    request = {"values": values, "count": count, "share": share, "seed": seed}
    conversations: list[list[dict[str, Any]]] = _run_child(
        "examples", environment, request, timeout_s, allow_download=True
    )["examples"]
    return conversations


def _require_answer(child_result: BoundedResult, file: str, out: Path, timeout_s: float) -> None:
    """Raise the error of a child that has written no answer."""
    if child_result.end_reason == "time":
        raise EnvironmentTimeoutError(
            f"{file} was still being imported after {timeout_s:.0f} s; an environment must load "
            "its data in setup(), not at import. `lachesis env show NAME` waits longer, and its "
            f"result is cached. The output ends:\n{redact(child_result.last_lines(15))}"
        )
    if child_result.end_reason == "output":
        raise EnvironmentLoadError(
            f"{file} was killed while it was imported, because it printed more than "
            f"{MAX_OUTPUT_BYTES // 1_000_000} MB; its last line: "
            f"{shorten(redact(child_result.last_lines(1)), 80)!r}"
        )
    if not out.is_file():
        raise EnvironmentLoadError(
            f"{file} ended the process (exit code {child_result.exit_code}) while it was "
            f"imported:\n{redact(child_result.last_lines(15))}"
        )


def _run_child(
    child_command: str,
    environment: Environment,
    request: dict[str, Any],
    timeout_s: float,
    *,
    allow_download: bool = False,
) -> dict[str, Any]:
    """Run `lachesis.environment_process` in a child and return the JSON it writes to a file.

    Its printed output may hold anything and be endless. Only commands that load the data set may
    download. The child runs the source that the key of a cached answer is about.
    """
    file = environment.file_path
    request = {**request, "source": read_source(Path(file)).decode("latin-1")}
    offline_env = {} if allow_download else {"HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory(prefix="lachesis-") as folder:
        out = Path(folder) / "answer.json"
        arguments = [child_command, file, environment.class_name, str(out)]
        command = [
            find_interpreter(Path(file)),
            "-P",
            "-m",
            "lachesis.environment_process",
            *arguments,
        ]
        env = build_child_env({**offline_env, **read_passed_variables(), "WANDB_MODE": "disabled"})
        child_result = run_bounded(
            command, input_bytes=json.dumps(request).encode(), env=env, timeout_s=timeout_s
        )
        _require_answer(child_result, file, out, timeout_s)
        answer: dict[str, Any] = json.loads(out.read_text())
    if "traceback" in answer:
        raise _make_import_error(file, answer)
    return answer


def _make_import_error(file: str, answer: dict[str, Any]) -> EnvironmentLoadError:
    """Return the error of a file that raised, on one line; `details` has the traceback."""
    message = f"{file} cannot be imported: {redact(answer['error'])}"
    if answer.get("advice"):  # A missing package needs no traceback.
        return EnvironmentLoadError(f"{message}; {answer['advice']}")
    command = shlex.join([find_interpreter(Path(file)), file])
    return EnvironmentLoadError(
        f"{message}; `{command}` shows the traceback", traceback=redact(answer["traceback"])
    )
