"""Which code an environment is: a hash over its file and the modules beside it that it imports; and how it is imported."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from lachesis.errors import EnvironmentLoadError


def root(file: Path) -> Path:
    """The folder that its imports start from: its own, or for a module of a package the one that holds the package."""
    folder = file.parent
    while (folder / "__init__.py").is_file():
        folder = folder.parent
    return folder


def module_name(file: Path) -> str | None:
    """The dotted name of a module of a package; None for a file that stands alone."""
    place = file.relative_to(root(file)).with_suffix("")
    return ".".join(place.parts) if len(place.parts) > 1 else None


def fingerprint(file: Path, values: Mapping[str, object] = MappingProxyType({})) -> str:
    """16 hexadecimal digits that change when the environment's file changes, or a module in its folder or package that it
    imports, directly or through others; also those that one of the values of its fields names, as FILE.py or FILE.py:NAME.
    Raises EnvironmentLoadError when the file cannot be read."""
    digest = hashlib.sha256()
    for one in sorted(files(file.resolve()).union(*map(files, _named(values)))):
        try:
            digest.update(one.name.encode() + b"\0" + one.read_bytes() + b"\0")
        except OSError as error:
            raise EnvironmentLoadError(f"{one} cannot be read: {error.strerror}") from error
    return digest.hexdigest()[:16]


def _named(values: Mapping[str, object]) -> list[Path]:
    texts = [value for value in values.values() if isinstance(value, str)]
    places = [Path(text if text.endswith(".py") else text.rpartition(":")[0]).expanduser() for text in texts]
    return [place.resolve() for place in places if place.suffix == ".py" and place.is_absolute() and place.is_file()]


def files(file: Path) -> set[Path]:
    """The file, and the modules of its folder or package that it imports, directly or through others."""
    found: set[Path] = set()
    todo = [file]
    while todo:
        one = todo.pop()
        if one not in found:
            found.add(one)
            todo += _imported(one, root(file))
    return found


def _imported(file: Path, folder: Path) -> list[Path]:
    """The files below `folder` that this one imports by name; a name that is not there comes from elsewhere."""
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError, OSError):
        return []  # its bytes are part of the hash all the same
    places: list[Path] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            places += [start / Path(*alias.name.split(".")) for alias in node.names for start in (folder, file.parent)]
        elif isinstance(node, ast.ImportFrom):
            starts = [file.parents[node.level - 1]] if 0 < node.level <= len(file.parents) else [folder, file.parent]
            bases = [start / Path(*(node.module or "").split(".")) for start in starts]
            places += [*bases, *(base / alias.name for base in bases for alias in node.names)]
    candidates = [path for place in places for path in (place.with_suffix(".py"), place / "__init__.py") if place.name]
    return [path for path in dict.fromkeys(candidates) if path.is_relative_to(folder) and path.is_file()]
