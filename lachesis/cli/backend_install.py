"""Run `lachesis backend install`: make the environment of an engine of others."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

from lachesis.base.errors import ConfigError, MissingDependencyError
from lachesis.cli import console
from lachesis.cli.console import print_answer
from lachesis.cli.layout import make_pairs_table
from lachesis.config.backends import BACKENDS, Backend

NEWEST_PYTHON = 14


def handle_backend_install(args: argparse.Namespace) -> int:
    """Install the packages of a back end into an environment of its own."""
    if args.target not in BACKENDS:
        raise ConfigError(
            f"there is no back end {args.target or 'without a name'} to install; allowed: "
            f"{', '.join(BACKENDS)}. TuFT and miles are started by hand and connected to by their "
            "address"
        )
    backend = BACKENDS[args.target]
    python = _find_python(backend, args.python)
    if not args.json:
        packages = ", ".join(backend.packages)
        console.print_note(f"installing {packages} into {backend.folder} (several GB, minutes)")
    _install(backend, python)
    answer = {
        "backend": backend.name,
        "folder": str(backend.folder),
        "next": f"lachesis train ENVIRONMENT --profile custom --set backend={backend.name}",
    }
    print_answer(args, answer, make_pairs_table([(name, text) for name, text in answer.items()]))
    return 0


def _find_python(backend: Backend, wanted: str | None) -> str:
    """Return an interpreter that is new enough: the one that was named, this one, or another."""
    major, minor = backend.min_python
    names = [f"python{major}.{number}" for number in range(minor, NEWEST_PYTHON + 1)]
    others = [*filter(None, map(shutil.which, names)), *_list_pyenv_pythons()]
    candidates = [wanted] if wanted else [sys.executable, *others]
    for candidate in candidates:
        if _read_version(candidate) >= backend.min_python:
            return candidate
    raise MissingDependencyError(
        f"{backend.name} needs Python {major}.{minor} or newer, and "
        f"{wanted or f'this one is {sys.version_info[0]}.{sys.version_info[1]}'}; name another "
        "one with --python"
    )


def _list_pyenv_pythons() -> list[str]:
    """Return the interpreters that pyenv has installed, whose commands may be switched off."""
    root = Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser()
    return [str(python) for python in sorted(root.glob("versions/3.*/bin/python"))]


def _read_version(python: str) -> tuple[int, ...]:
    code = "import sys; print(*sys.version_info[:2])"
    try:
        result = subprocess.run(
            [python, "-c", code], capture_output=True, text=True, timeout=30, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return (0, 0)
    return tuple(map(int, result.stdout.split()))


def _install(backend: Backend, python: str) -> None:
    """Make the environment, or complete it.

    Raises:
        MissingDependencyError: A package cannot be installed.
    """
    own_uv = backend.folder / "bin" / "uv"
    commands = [
        [python, "-m", "venv", str(backend.folder)],
        [str(backend.python), "-m", "pip", "install", "--quiet", "uv"],
        [str(own_uv), "pip", "install", "--python", str(backend.python), *backend.packages],
    ]
    backend.folder.parent.mkdir(parents=True, exist_ok=True)
    for command in commands:
        # What the programs print goes to stderr, where it is no part of an answer.
        result = subprocess.run(command, stdout=sys.stderr.fileno(), check=False)
        if result.returncode != 0:
            raise MissingDependencyError(
                f"`{' '.join(map(_shorten_path, command))}` failed with exit code "
                f"{result.returncode}; its reason is above, and the same command goes on from there"
            )


def _shorten_path(part: str) -> str:
    return Path(part).name if part.startswith("/") else part
