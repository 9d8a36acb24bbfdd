"""Find environments by reading their files, without importing them.

A file is read as a syntax tree; a class counts when it inherits, directly or through other scanned classes, from Atropos'
`BaseEnv`. A place that is searched is a folder, with the folders below it, or one file.
"""

from __future__ import annotations

import ast
import collections
import functools
import itertools
import os
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from lachesis.base import paths
from lachesis.catalog import fingerprint

ROOT_CLASS = "BaseEnv"
OWN_BASES = frozenset({"TaskEnv", "ConversationEnv", "VerifiersEnv"})
"""Of `lachesis.environment`; each is a BaseEnv."""
LEFT_OUT = frozenset({"tests", "site-packages", "node_modules", "venv"})
MOST_DEPTH = 5
MOST_FILES = 5000


@dataclass(frozen=True)
class Environment:
    """What the source says about one environment."""

    name: str
    class_name: str
    file_path: str
    description: str
    config_class: str


@dataclass(frozen=True)
class Scan:
    """The environments found, the files that do not parse with the reason, and those that go by another name than their own
    because it was taken: under that name, why."""

    environments: list[Environment]
    problems: dict[str, str] = field(default_factory=dict)
    clashes: dict[str, str] = field(default_factory=dict)


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


def scan(places: Iterable[Path] | None = None) -> Scan:
    """Every environment in `places` (default: `paths.environment_dirs()`), in order of place and file name, those of a folder
    before those of the folders below it."""
    classes: list[_Class] = []
    problems: dict[str, str] = {}
    offered: set[Path] = set()
    known: set[Path] = set()
    for place in dict.fromkeys(one.resolve() for one in (places if places is not None else paths.environment_dirs())):
        files = list(itertools.islice(_files(place), MOST_FILES + 1))
        if len(files) > MOST_FILES:
            problems[str(place)] = f"it holds more than {MOST_FILES} files of Python; name a smaller folder"
            files.pop()
        offered |= set(files)
        beside = fingerprint.files(place) - set(files) if place.is_file() else set()
        for file in [*files, *sorted(beside)]:
            if file in known:  # of a folder that is searched too
                continue
            known.add(file)
            read = _looked_at(file)
            classes += read.classes
            if read.problem:
                problems[str(file)] = read.problem
    found = Scan([], problems)
    files_of: dict[str, Path] = {}
    for one in _leaves(_descendants(classes)):
        if one.file in offered:
            environment = _describe(one, files_of)
            own = one.own_name or one.file.stem
            if environment.name != own:
                found.clashes[environment.name] = f"{one.file}: its name {own} is that of {files_of[own]}"
            files_of[environment.name] = one.file
            found.environments.append(environment)
    return found


def _files(place: Path) -> Iterator[Path]:
    """The files that may hold environments."""
    if place.is_file():
        yield place
        return
    for folder, below, names in os.walk(place):
        depth = len(Path(folder).relative_to(place).parts)
        below[:] = sorted(one for one in below if depth < MOST_DEPTH and not one.startswith((".", "_")) and one not in LEFT_OUT)
        yield from (Path(folder, name) for name in sorted(names) if name.endswith(".py") and not name.startswith("_"))


def _looked_at(file: Path) -> _File:
    try:
        stat = file.stat()
        return _read(file, stat.st_mtime_ns, stat.st_size)
    except OSError as error:
        return _File(problem=f"{type(error).__name__}: {error}")


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


def _classes(file: Path, module: ast.Module) -> tuple[_Class, ...]:
    imports = list(_imports(module.body))
    aliases = {
        alias.asname: alias.name for node in imports if isinstance(node, ast.ImportFrom) for alias in node.names if alias.asname
    }
    roots = OWN_BASES if _names(imports, "lachesis.environment") else frozenset()
    result = []
    for node in module.body:
        if isinstance(node, ast.ClassDef):
            names = {aliases.get(name, name) for base in node.bases if (name := _base_name(base))}
            text = (ast.get_docstring(node) or ast.get_docstring(module) or "").strip()
            result.append(
                _Class(
                    name=node.name,
                    file=file,
                    bases=frozenset(ROOT_CLASS if name in roots else name for name in names),
                    own_name=_attribute(node, "name"),
                    config_class=_attribute(node, "env_config_cls"),
                    description=text.splitlines()[0] if text else "",
                )
            )
    return tuple(result)


def _imports(body: Iterable[ast.stmt]) -> Iterator[ast.Import | ast.ImportFrom]:
    """The import statements that bind names of the module: under `if`, `try` and `with` too, none in a function or class."""
    for node in body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            for part in ("body", "handlers", "orelse", "finalbody"):
                yield from _imports(getattr(node, part, ()))


def _names(imports: Iterable[ast.Import | ast.ImportFrom], module: str) -> bool:
    """Whether one of them imports the module or something of it."""
    parent, _, last = module.rpartition(".")
    imported: set[str] = set()
    for node in imports:
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif node.module:
            whole = node.module == parent and any(alias.name == last for alias in node.names)
            imported.add(module if whole else node.module)
    return any(one == module or one.startswith(f"{module}.") for one in imported)


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
    together: dict[Path, list[_Class]] = collections.defaultdict(list)
    for one in classes:
        together[one.file].append(one)
    return [one for one in classes if not any(one.name in other.bases for other in together[one.file] if other is not one)]


def _describe(one: _Class, taken: Container[str]) -> Environment:
    long = f"{one.file.stem}-{one.name}"
    names = itertools.chain([one.own_name or one.file.stem, one.file.stem, long], (f"{long}-{n}" for n in itertools.count(2)))
    name = next(candidate for candidate in names if candidate not in taken)
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
