"""Find environments by parsing their files, without importing them.

A class counts when it inherits from Atropos' `BaseEnv`, directly or through other classes that were
scanned. The search path consists of files and of folders, which are searched with their subfolders.
"""

import ast
import collections
import functools
import itertools
import os
import re
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from lachesis.base import paths
from lachesis.base.files import read_cached
from lachesis.environment_catalog import fingerprint

ROOT_CLASS = "BaseEnv"
# Classes of `lachesis.environment`; each inherits from `BaseEnv`.
LACHESIS_BASES = frozenset({"TaskEnv", "ConversationEnv", "VerifiersEnv"})
IGNORED_FOLDERS = frozenset({"tests", "site-packages", "node_modules", "venv"})
MAX_DEPTH = 5
MAX_FILES = 5000


@dataclass(frozen=True)
class Environment:
    """Describe one environment by what its source code says."""

    name: str
    class_name: str
    file_path: str
    description: str
    config_class: str


@dataclass(frozen=True)
class ScanResult:
    """Hold the environments that were found, and the files that cause problems."""

    environments: list[Environment]
    problems: dict[str, str] = field(default_factory=dict)
    """Why a file or folder could not be scanned, by its path."""
    clashes: dict[str, str] = field(default_factory=dict)
    """Why an environment got another name than its own, by the name it got."""


@dataclass(frozen=True)
class _ScannedClass:
    """Hold the name, bases and attributes of one class statement."""

    name: str
    file: Path
    bases: frozenset[str]
    own_name: str | None
    config_class: str | None
    description: str


@dataclass(frozen=True)
class _ScannedFile:
    classes: tuple[_ScannedClass, ...] = ()
    problem: str | None = None


def scan_environments(search_paths: Iterable[Path] | None = None) -> ScanResult:
    """Return every environment on the search path, by default `paths.environment_dirs()`.

    They are in the order of the search path and of their file names; those of a folder come before
    those of its subfolders.
    """
    classes: list[_ScannedClass] = []
    problems: dict[str, str] = {}
    searched_files: set[Path] = set()
    scanned_files: set[Path] = set()
    if search_paths is None:
        search_paths = paths.environment_dirs()
    for search_path in dict.fromkeys(path.resolve() for path in search_paths):
        files = list(itertools.islice(_list_python_files(search_path), MAX_FILES + 1))
        if len(files) > MAX_FILES:
            problems[str(search_path)] = (
                f"it holds more than {MAX_FILES} Python files; name a smaller folder"
            )
            files.pop()
        searched_files |= set(files)
        # A file that was named alone may inherit from classes of other files.
        imported_files: set[Path] = set()
        if search_path.is_file():
            imported_files = fingerprint.list_source_files(search_path) - set(files)
        for file in [*files, *sorted(imported_files)]:
            if file in scanned_files:  # Another folder on the search path contains it.
                continue
            scanned_files.add(file)
            scanned = _scan_file(file)
            classes += scanned.classes
            if scanned.problem:
                problems[str(file)] = scanned.problem
    # Classes of imported files are only there to recognise subclasses of theirs.
    leaves = _select_leaves(_select_descendants(classes))
    own_leaves = [leaf for leaf in leaves if leaf.file in searched_files]
    return _name_environments(own_leaves, problems)


def _name_environments(classes: list[_ScannedClass], problems: dict[str, str]) -> ScanResult:
    """Return the environments under names of their own; note those whose name was taken."""
    result = ScanResult([], problems)
    file_by_name: dict[str, Path] = {}
    for scanned_class in classes:
        environment = _build_environment(scanned_class, file_by_name)
        own_name = scanned_class.own_name or scanned_class.file.stem
        if environment.name != own_name:
            result.clashes[environment.name] = (
                f"{scanned_class.file}: its name {own_name} is taken by {file_by_name[own_name]}"
            )
        file_by_name[environment.name] = scanned_class.file
        result.environments.append(environment)
    return result


def _list_python_files(search_path: Path) -> Iterator[Path]:
    """Yield the files that may hold environments."""
    if search_path.is_file():
        yield search_path
        return
    for folder, subfolders, names in os.walk(search_path):
        depth = len(Path(folder).relative_to(search_path).parts)
        subfolders[:] = sorted(
            subfolder
            for subfolder in subfolders
            if depth < MAX_DEPTH
            and not subfolder.startswith((".", "_"))
            and subfolder not in IGNORED_FOLDERS
        )
        yield from (
            Path(folder, name)
            for name in sorted(names)
            if name.endswith(".py") and not name.startswith("_")
        )


def _scan_file(file: Path) -> _ScannedFile:
    try:
        stat = file.stat()
        return _parse_file(file, stat.st_mtime_ns, stat.st_size)
    except OSError as error:
        return _ScannedFile(problem=f"{type(error).__name__}: {error}")


@functools.lru_cache(maxsize=4096)
def _parse_file(file: Path, changed_ns: int, size: int) -> _ScannedFile:
    """Return the classes of a file; the cache is valid for one time of change and size.

    Raises:
        OSError: The file cannot be read.
    """
    try:
        module = ast.parse(read_cached(file).decode("utf-8", "replace"), str(file))
    except (SyntaxError, ValueError) as error:
        if isinstance(error, SyntaxError):
            line = f", line {error.lineno}"
        else:
            line = ""
        reason = error.msg if isinstance(error, SyntaxError) else str(error)
        return _ScannedFile(problem=f"{type(error).__name__}{line}: {reason}")
    return _ScannedFile(_list_classes(file, module))


def _list_classes(file: Path, module: ast.Module) -> tuple[_ScannedClass, ...]:
    """Return the classes of a parsed file with their bases, names and descriptions."""
    imports = list(_list_imports(module.body))
    aliases = {
        alias.asname: alias.name
        for node in imports
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname
    }
    if _has_import_of(imports, "lachesis.environment"):
        roots = LACHESIS_BASES
    else:
        roots = frozenset()
    result = []
    for node in module.body:
        if isinstance(node, ast.ClassDef):
            names = {aliases.get(name, name) for base in node.bases if (name := _base_name(base))}
            docstring = (ast.get_docstring(node) or ast.get_docstring(module) or "").strip()
            result.append(
                _ScannedClass(
                    name=node.name,
                    file=file,
                    bases=frozenset(ROOT_CLASS if name in roots else name for name in names),
                    own_name=_read_class_attribute(node, "name"),
                    config_class=_read_class_attribute(node, "env_config_cls"),
                    description=_get_first_sentence(docstring),
                )
            )
    return tuple(result)


def _get_first_sentence(docstring: str) -> str:
    """Return the first sentence of a docstring as one line."""
    paragraph = " ".join(docstring.partition("\n\n")[0].split())
    return re.split(r"(?<=[.!?])\s+(?=[A-Z])", paragraph, maxsplit=1)[0]


def _list_imports(body: Iterable[ast.stmt]) -> Iterator[ast.Import | ast.ImportFrom]:
    """Yield the module's own import statements, not those in functions or classes."""
    for node in body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            for part in ("body", "handlers", "orelse", "finalbody"):
                yield from _list_imports(getattr(node, part, ()))


def _has_import_of(imports: Iterable[ast.Import | ast.ImportFrom], module: str) -> bool:
    """Return whether one of the statements imports the module or something from it."""
    parent, _, last = module.rpartition(".")
    imported: set[str] = set()
    for node in imports:
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif node.module:
            is_module_import = node.module == parent and any(
                alias.name == last for alias in node.names
            )
            imported.add(module if is_module_import else node.module)
    return any(name == module or name.startswith(f"{module}.") for name in imported)


def _base_name(base: ast.expr) -> str | None:
    if isinstance(base, ast.Subscript):  # Generic[...]
        base = base.value
    if isinstance(base, ast.Name):
        return base.id
    if isinstance(base, ast.Attribute):
        return base.attr
    return None


def _select_descendants(classes: list[_ScannedClass]) -> list[_ScannedClass]:
    """Return the classes that reach BaseEnv through bases, compared by name only."""
    environment_names = {ROOT_CLASS}
    while True:
        extended_names = environment_names | {
            scanned_class.name
            for scanned_class in classes
            if scanned_class.bases & environment_names
        }
        if extended_names == environment_names:
            return [
                scanned_class
                for scanned_class in classes
                if scanned_class.bases & environment_names
            ]
        environment_names = extended_names


def _select_leaves(classes: list[_ScannedClass]) -> list[_ScannedClass]:
    """Return the classes that no other class of the file inherits from."""
    classes_by_file: dict[Path, list[_ScannedClass]] = collections.defaultdict(list)
    for scanned_class in classes:
        classes_by_file[scanned_class.file].append(scanned_class)
    return [
        scanned_class
        for scanned_class in classes
        if not any(
            scanned_class.name in other.bases
            for other in classes_by_file[scanned_class.file]
            if other is not scanned_class
        )
    ]


def _build_environment(scanned_class: _ScannedClass, taken_names: Container[str]) -> Environment:
    """Return a class that was found as an environment with a name that no other one has."""
    long_name = f"{scanned_class.file.stem}-{scanned_class.name}"
    names = itertools.chain(
        [scanned_class.own_name or scanned_class.file.stem, scanned_class.file.stem, long_name],
        (f"{long_name}-{n}" for n in itertools.count(2)),
    )
    name = next(candidate for candidate in names if candidate not in taken_names)
    return Environment(
        name=name,
        class_name=scanned_class.name,
        file_path=str(scanned_class.file.resolve()),
        description=scanned_class.description,
        config_class=scanned_class.config_class or "BaseEnvConfig",
    )


def _read_class_attribute(node: ast.ClassDef, name: str) -> str | None:
    """Return the text, or the name, that a class body assigns to an attribute, or None."""
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
