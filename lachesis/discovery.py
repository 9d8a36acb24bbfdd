"""Find environments without importing them, and ask one for its configuration in a child process.

A file is read as a syntax tree; a class counts when it inherits, directly or through other scanned classes, from Atropos'
`BaseEnv`. Whatever an environment does when it is imported (crash, hang, print) happens in the child.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lachesis import paths
from lachesis.child import child_environment, chosen
from lachesis.errors import EnvironmentLoadError, EnvironmentTimeoutError, UnknownEnvironmentError, shorten
from lachesis.runs import storage_errors, tail, write_private

ROOT_CLASS = "BaseEnv"
SCHEMA_TIMEOUT_S = 90.0


@dataclass(frozen=True)
class Environment:
    """What the source says about one environment."""

    name: str
    class_name: str
    file_path: str
    description: str
    config_class: str


@dataclass(frozen=True)
class Schema:
    """What the environment itself says about its configuration. `properties` is pydantic's JSON schema per field, `values`
    what `config_init()` gave. `checks` is true when its class has validators of its own, which that schema does not show.
    `warning` tells why it is Atropos' general configuration instead, if it is."""

    properties: dict[str, Any]
    definitions: dict[str, Any]
    values: dict[str, Any]
    checks: bool = False
    warning: str | None = None


@dataclass(frozen=True)
class Scan:
    """The environments found, and the files that do not parse with the reason."""

    environments: list[Environment]
    problems: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class _Class:
    """What one class statement says."""

    name: str
    file: Path
    bases: frozenset[str]
    own_name: str | None
    config_class: str | None
    description: str


@dataclass(frozen=True)
class _File:
    classes: tuple[_Class, ...] = ()
    problem: str | None = None


def scan(folders: Iterable[Path] | None = None) -> Scan:
    """Every environment in `folders` (default: `paths.environment_dirs()`), in order of folder and file name."""
    classes: list[_Class] = []
    problems: dict[str, str] = {}
    for folder in dict.fromkeys(one.resolve() for one in (folders if folders is not None else paths.environment_dirs())):
        for file in sorted(folder.glob("*.py")):
            if file.name.startswith("_"):
                continue
            try:
                stat = file.stat()
                read = _read(file, stat.st_mtime_ns, stat.st_size)
            except OSError as error:
                read = _File(problem=f"{type(error).__name__}: {error}")
            classes += read.classes
            if read.problem:
                problems[str(file)] = read.problem
    found: list[Environment] = []
    taken: set[str] = set()
    for one in _leaves(_descendants(classes)):
        environment = _describe(one, taken)
        taken.add(environment.name)
        found.append(environment)
    return Scan(found, problems)


@functools.lru_cache(maxsize=4096)
def _read(file: Path, changed_ns: int, size: int) -> _File:
    """The classes of one file as it is since `changed_ns`. Raises OSError."""
    try:
        module = ast.parse(file.read_text(encoding="utf-8", errors="replace"), str(file))
    except (SyntaxError, ValueError) as error:
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) else ""
        reason = error.msg if isinstance(error, SyntaxError) else str(error)
        return _File(problem=f"{type(error).__name__}{line}: {reason}")
    return _File(_classes(file, module))


def find(name: str, folders: Iterable[Path] | None = None) -> Environment:
    """Raises UnknownEnvironmentError with the names there are, or EnvironmentLoadError when that file does not parse."""
    result = scan(folders)
    for environment in result.environments:
        if environment.name == name:
            return environment
    for file, reason in result.problems.items():
        if Path(file).stem == name:
            raise EnvironmentLoadError(f"{file} does not parse: {reason}")
    available = [environment.name for environment in result.environments]
    raise UnknownEnvironmentError(
        f"there is no environment {shorten(repr(name), 80)}; available: {', '.join(available) or 'none'} "
        f"(searched {', '.join(map(str, paths.environment_dirs())) or 'no folder'}; more folders: LACHESIS_ENVIRONMENTS)",
        available=available,
    )


def _classes(file: Path, module: ast.Module) -> tuple[_Class, ...]:
    aliases = {
        alias.asname: alias.name
        for node in ast.walk(module)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname
    }
    result = []
    for node in module.body:
        if isinstance(node, ast.ClassDef):
            names = {name for base in node.bases if (name := _base_name(base))}
            text = (ast.get_docstring(node) or ast.get_docstring(module) or "").strip()
            result.append(
                _Class(
                    name=node.name,
                    file=file,
                    bases=frozenset(aliases.get(name, name) for name in names),
                    own_name=_attribute(node, "name"),
                    config_class=_attribute(node, "env_config_cls"),
                    description=text.splitlines()[0] if text else "",
                )
            )
    return tuple(result)


def _base_name(base: ast.expr) -> str | None:
    if isinstance(base, ast.Subscript):  # Generic[...]
        base = base.value
    return base.id if isinstance(base, ast.Name) else base.attr if isinstance(base, ast.Attribute) else None


def _descendants(classes: list[_Class]) -> list[_Class]:
    """Those that reach BaseEnv through the bases; names are compared across files, as imports are not followed."""
    known = {ROOT_CLASS}
    while True:
        grown = known | {one.name for one in classes if one.bases & known}
        if grown == known:
            return [one for one in classes if one.bases & known]
        known = grown


def _leaves(classes: list[_Class]) -> list[_Class]:
    """Without those that another class of the same file builds on: they are not meant to be run."""
    return [
        one
        for one in classes
        if not any(other.file == one.file and one.name in other.bases for other in classes if other is not one)
    ]


def _describe(one: _Class, taken: set[str]) -> Environment:
    name = one.own_name or one.file.stem
    if name in taken:
        name = one.file.stem if one.file.stem not in taken else f"{one.file.stem}-{one.name}"
    return Environment(
        name=name,
        class_name=one.name,
        file_path=str(one.file.resolve()),
        description=one.description,
        config_class=one.config_class or "BaseEnvConfig",
    )


def _attribute(node: ast.ClassDef, name: str) -> str | None:
    for statement in node.body:
        targets: list[ast.expr] = []
        if isinstance(statement, ast.Assign):
            targets = statement.targets
        elif isinstance(statement, ast.AnnAssign):
            targets = [statement.target]
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            value = statement.value  # type: ignore[attr-defined]
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                return value.value
            if isinstance(value, ast.Name | ast.Attribute):
                return _base_name(value)
    return None


def schema(environment: Environment, timeout_s: float = SCHEMA_TIMEOUT_S) -> Schema:
    """The environment's configuration, from a child process; cached until the file changes.

    Raises EnvironmentLoadError with the traceback when the import fails, EnvironmentTimeoutError when it does not end.
    """
    cache = _cache_file(environment, "")
    kept = _kept(cache)
    if kept is not None:
        return kept
    answer = _ask_child(environment, {}, timeout_s)
    result = Schema(**answer["schema"])
    if result.warning is None:
        _remember(cache, answer["schema"])
    return result


def _kept(cache: Path) -> Schema | None:
    """What was learnt before; None when it is absent or damaged, and has to be learnt again."""
    try:
        found = Schema(**json.loads(cache.read_text()))
    except (OSError, ValueError, TypeError, RecursionError):
        return None
    properties = found.properties.values() if isinstance(found.properties, dict) else [None]
    parts = (found.definitions, found.values, *properties)
    return found if all(isinstance(one, dict) for one in parts) else None


def check_values(environment: Environment, values: dict[str, Any], timeout_s: float = SCHEMA_TIMEOUT_S) -> list[dict[str, str]]:
    """What the environment's own configuration class says against these values: `message`, and the `field` that is wrong by
    itself or "". Empty when it takes them. The answer is kept until the file changes."""
    cache = _cache_file(environment, json.dumps(values, sort_keys=True, default=str))
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
        kept: list[dict[str, str]] = json.loads(cache.read_text())["errors"]
        return kept
    errors: list[dict[str, str]] = _ask_child(environment, values, timeout_s)["errors"]
    _remember(cache, {"errors": errors})
    return errors


def _cache_file(environment: Environment, question: str) -> Path:
    """Named after all that the answer depends on."""
    file = Path(environment.file_path)
    siblings = sorted(file.parent.glob("*.py"))  # the class may inherit its fields from another file
    source = b""
    for one in siblings:
        with contextlib.suppress(OSError):  # an unreadable neighbour is told by the scan
            source += one.read_bytes()
    key = hashlib.sha256(source + repr((file, environment.class_name, _versions(), question)).encode()).hexdigest()[:32]
    return paths.home() / "cache" / "schemas" / f"{key}.json"


@functools.cache
def _versions() -> tuple[str, ...]:
    return (sys.version, *(importlib.metadata.version(name) for name in ("atroposlib", "lachesis")), "with checks")


def _remember(cache: Path, content: Any) -> None:
    with storage_errors(cache.parent):
        cache.parent.mkdir(parents=True, exist_ok=True)
    write_private(cache, json.dumps(content, default=str))


def _ask_child(environment: Environment, values: dict[str, Any], timeout_s: float) -> dict[str, Any]:
    """Run `lachesis.environment describe` and read the file it writes; its output may hold anything, so it goes to a log."""
    with tempfile.TemporaryDirectory(prefix="lachesis-") as folder:
        out, log = Path(folder) / "answer.json", Path(folder) / "log"
        place = (environment.file_path, environment.class_name, str(out))
        command = [sys.executable, "-P", "-m", "lachesis.environment", "describe", *place]
        with log.open("wb") as stream:
            child = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=stream,
                stderr=stream,
                env=child_environment({**chosen(), "WANDB_MODE": "disabled", "HF_HUB_OFFLINE": "1"}),
                start_new_session=True,
            )
            try:
                child.communicate(json.dumps(values).encode(), timeout=timeout_s)
            except subprocess.TimeoutExpired:
                raise EnvironmentTimeoutError(
                    f"{environment.file_path} was still being imported after {timeout_s:.0f} s; an environment must load its "
                    "data in setup(), not at import. `lachesis envs NAME` waits longer, and what it learns is kept. Its "
                    "output ends:"
                    f"\n{tail(log, 15)}"
                ) from None
            finally:  # also at Ctrl-C, and for what the import has started
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
                child.wait()
        if not out.is_file():
            raise EnvironmentLoadError(
                f"{environment.file_path} ended the process (exit code {child.returncode}) while it was imported:\n"
                f"{tail(log, 15)}"
            )
        answer: dict[str, Any] = json.loads(out.read_text())
    if "traceback" in answer:
        raise EnvironmentLoadError(
            f"{environment.file_path} cannot be imported: {answer['error']}\n{answer['traceback']}",
            traceback=answer["traceback"],
        )
    return answer
