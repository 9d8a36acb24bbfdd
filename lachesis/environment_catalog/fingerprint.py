"""Compute a hash of an environment's code, and find out how its file is imported.

The code is the file and the modules of its folder, package or repository that it imports.
"""

import ast
import functools
import hashlib
import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from lachesis.base.errors import EnvironmentLoadError
from lachesis.base.files import read_cached

REPOSITORY_MARKS = (".git", "pyproject.toml", "setup.py")
# The installed package is used even where the repository holds its source.
ATROPOS_PACKAGE = "atroposlib"
LACHESIS_PACKAGE = Path(__file__).resolve().parents[1]


def find_import_root(file: Path) -> Path:
    """Return the folder that the file's imports start from: its own folder, or the parent of its
    package.

    A file with relative imports belongs to a package even where no folder has an `__init__.py`.
    """
    folder = file.parent
    while (folder / "__init__.py").is_file():
        folder = folder.parent
    if folder == file.parent and (level := _read_import_level(file)) and level < len(file.parents):
        names = [parent.name for parent in file.parents[:level]]
        if all(name.isidentifier() for name in names) and _is_name_available(names[-1]):
            return file.parents[level]
    return folder


def _is_name_available(name: str) -> bool:
    """Return whether no installed module has this name, so that a folder can be imported by it."""
    try:
        spec = importlib.util.find_spec(name)
    except ValueError:  # The module has no spec.
        return False
    # A namespace package (a folder without `__init__.py`) can be extended by another folder.
    return spec is None or spec.origin is None


def build_search_path(file: Path, installed: Sequence[str]) -> list[str]:
    """Return where a child that runs the file looks for modules.

    Its own root comes first, then the installed packages, then other folders, which must not hide
    an installed package.
    """
    own_root = find_import_root(file)
    has_ordinary_layout = own_root == file.parent or (file.parent / "__init__.py").is_file()
    is_own_root_first = has_ordinary_layout and not (own_root / ATROPOS_PACKAGE).is_dir()
    others = [str(folder) for folder in list_further_roots(file)]
    if is_own_root_first:
        return [str(own_root), *installed, *others]
    return [*installed, str(own_root), *others]


def list_further_roots(file: Path) -> list[Path]:
    """Return the other folders that Atropos files import from: their own and the repository."""
    folders = (file.parent, find_repository(file))
    return [
        folder
        for folder in dict.fromkeys(folders)
        if folder is not None and folder != find_import_root(file)
    ]


def find_repository(file: Path) -> Path | None:
    """Return the nearest folder above the file that is a repository or project, if any."""
    return next(
        (
            folder
            for folder in file.parents
            if any((folder / mark).exists() for mark in REPOSITORY_MARKS)
        ),
        None,
    )


def _read_import_level(file: Path) -> int:
    """Return the largest number of dots in an import of the file."""
    return max((statement.level or 0 for statement in _read_imports(file)), default=0)


class _Import(NamedTuple):
    """Hold `from .module import names` with its number of dots, or `import names` without a
    module."""

    level: int | None
    module: str
    names: tuple[str, ...]


def _read_imports(file: Path) -> tuple[_Import, ...]:
    """Return the imports of a file, or none for a file that cannot be read."""
    try:
        stat = file.stat()
        return _parse_imports(file, stat.st_mtime_ns, stat.st_size)
    except (SyntaxError, ValueError, OSError):
        return ()


@functools.lru_cache(maxsize=4096)
def _parse_imports(file: Path, changed_ns: int, size: int) -> tuple[_Import, ...]:
    """Return the imports of a file; a file that has not changed is parsed once."""
    imports = []
    for node in ast.walk(ast.parse(read_cached(file))):
        if isinstance(node, ast.Import):
            imports.append(_Import(None, "", tuple(alias.name for alias in node.names)))
        elif isinstance(node, ast.ImportFrom):
            names = tuple(alias.name for alias in node.names)
            imports.append(_Import(node.level, node.module or "", names))
    return tuple(imports)


def get_module_name(file: Path) -> str | None:
    """Return the dotted name of a module in a package, or None for a file that stands alone."""
    relative_path = file.relative_to(find_import_root(file)).with_suffix("")
    if len(relative_path.parts) > 1:
        return ".".join(relative_path.parts)
    return None


def compute_fingerprint(file: Path, values: Mapping[str, object] = MappingProxyType({})) -> str:
    """Return 16 hexadecimal digits that change when the code of the environment changes.

    The code is the environment's file and the modules of its folder or package that it imports,
    directly or indirectly. Files that a field's value names, as FILE.py or FILE.py:NAME, count too.

    Raises:
        EnvironmentLoadError: One of the files cannot be read.
    """
    digest = hashlib.sha256()
    for source_file in sorted(
        list_source_files(file.resolve()).union(*map(list_source_files, _list_named_files(values)))
    ):
        digest.update(source_file.name.encode() + b"\0" + read_source(source_file) + b"\0")
    return digest.hexdigest()[:16]


def read_source(file: Path) -> bytes:
    """Return the content of a file of code.

    Raises:
        EnvironmentLoadError: It cannot be read.
    """
    try:
        return read_cached(file)
    except OSError as error:
        raise EnvironmentLoadError(f"{file} cannot be read: {error.strerror}") from error


def _list_named_files(values: Mapping[str, object]) -> list[Path]:
    """Return the Python files that fields of an environment name, as PATH or PATH:NAME."""
    texts = [value for value in values.values() if isinstance(value, str)]
    paths = [
        Path(text if text.endswith(".py") else text.rpartition(":")[0]).expanduser()
        for text in texts
    ]
    return [
        path.resolve()
        for path in paths
        if path.suffix == ".py" and path.is_absolute() and path.is_file()
    ]


def list_source_files(file: Path) -> set[Path]:
    """Return the file and the modules of its folder, package or repository that it imports."""
    source_files: set[Path] = set()
    todo = [file]
    while todo:
        source_file = todo.pop()
        if source_file not in source_files:
            source_files.add(source_file)
            todo += _list_imported_files(
                source_file, (find_import_root(file), *list_further_roots(file))
            )
    return source_files


def _join_names(starts: Sequence[Path], dotted_names: Sequence[str]) -> list[Path]:
    """Return the possible places of these dotted modules in the folders, without suffix."""
    return [start / Path(*name.split(".")) for name in dotted_names for start in starts]


def _list_imported_files(file: Path, folders: Sequence[Path]) -> list[Path]:
    """Return the files below these folders that this file imports directly.

    A file that does not parse imports nothing; its bytes are part of the hash nevertheless.
    """
    module_paths: list[Path] = []
    for level, module, names in _read_imports(file):
        if level is None:
            module_paths += _join_names([*folders, file.parent], names)
        else:
            if 0 < level <= len(file.parents):
                starts = [file.parents[level - 1]]
            else:
                starts = [*folders, file.parent]
            bases = _join_names(starts, [module])
            # What is imported from a package may be a module of it.
            module_paths += [*bases, *(base / name for base in bases for name in names)]
    candidates = [
        path
        for module_path in module_paths
        for path in (module_path.with_suffix(".py"), module_path / "__init__.py")
        if module_path.name
    ]
    return [
        path
        for path in dict.fromkeys(candidates)
        if _is_own_source(path, folders) and path.is_file()
    ]


def _is_own_source(path: Path, folders: Sequence[Path]) -> bool:
    """Return whether a module belongs to one of the folders, and not to Lachesis or Atropos."""
    if path.is_relative_to(LACHESIS_PACKAGE) or ATROPOS_PACKAGE in path.parts:
        return False
    return any(path.is_relative_to(folder) for folder in folders)
