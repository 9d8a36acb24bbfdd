"""Which code an environment is: a hash over its file and the modules beside it that it imports."""

from __future__ import annotations

import ast
import hashlib
from pathlib import Path

from lachesis.errors import EnvironmentLoadError


def fingerprint(file: Path) -> str:
    """16 hexadecimal digits that change when the environment's file changes, or a module in its folder that it imports,
    directly or through others. Raises EnvironmentLoadError when the file cannot be read."""
    digest = hashlib.sha256()
    for one in sorted(_sources(file.resolve())):
        try:
            digest.update(one.name.encode() + b"\0" + one.read_bytes() + b"\0")
        except OSError as error:
            raise EnvironmentLoadError(f"{one} cannot be read: {error.strerror}") from error
    return digest.hexdigest()[:16]


def _sources(file: Path) -> set[Path]:
    found: set[Path] = set()
    todo = [file]
    while todo:
        one = todo.pop()
        if one not in found:
            found.add(one)
            todo += _imported(one, file.parent)
    return found


def _imported(file: Path, folder: Path) -> list[Path]:
    """The files below `folder` that this one imports by name; a name that is not there comes from elsewhere."""
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError, OSError):
        return []  # its bytes are part of the hash all the same
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            names += [base, *(f"{base}.{alias.name}".strip(".") for alias in node.names)]
    places = [root / Path(*name.split(".")) for name in names if name for root in {folder, file.parent}]
    candidates = [path for place in places for path in (place.with_suffix(".py"), place / "__init__.py")]
    return [path for path in candidates if path.is_file() and path.is_relative_to(folder)]
