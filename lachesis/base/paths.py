"""Locate the home folder with runs and models, and the checkout with flows and environments."""

from __future__ import annotations

import os
import re
from pathlib import Path

import platformdirs

from lachesis.base.errors import MissingDependencyError


def home() -> Path:
    """Return `$LACHESIS_HOME`, by default the user's data folder; it may not exist yet."""
    configured = os.environ.get("LACHESIS_HOME")
    if configured:
        return Path(configured).expanduser().resolve()
    return Path(platformdirs.user_data_dir("lachesis"))


def runs_dir(root: Path | None = None) -> Path:
    """Return the folder that holds one folder per run."""
    return (root or home()) / "runs"


def models_dir(root: Path | None = None) -> Path:
    """Return the folder that holds the tiny models."""
    return (root or home()) / "models"


def checkout_dir() -> Path:
    """Return the source checkout, with `flows/`, `tasks/`, `deployments/` and `environments/`.

    It is `$LACHESIS_CHECKOUT` if that is set, else the folder that this package was loaded from.

    Raises:
        MissingDependencyError: That folder has no `deployments/up.py`.
    """
    root = Path(os.environ.get("LACHESIS_CHECKOUT") or Path(__file__).resolve().parents[2])
    if not (root / "deployments" / "up.py").is_file():
        raise MissingDependencyError(
            f"{root} is not a Lachesis checkout (it has no deployments/up.py); the flows live in "
            f"the checkout, not in the installed package: clone the repository and set "
            f"LACHESIS_CHECKOUT to it"
        )
    return root


def environment_dirs() -> list[Path]:
    """Return where environments are searched: the folder of the checkout, then
    `$LACHESIS_ENVIRONMENTS`.

    That variable holds folders and files, separated as in `$PATH`.
    """
    builtin = (
        Path(os.environ.get("LACHESIS_CHECKOUT") or Path(__file__).resolve().parents[2])
        / "environments"
    )
    configured = [
        Path(p).expanduser()
        for p in os.environ.get("LACHESIS_ENVIRONMENTS", "").split(os.pathsep)
        if p
    ]
    return [path for path in (builtin, *configured) if path.is_dir() or path.suffix == ".py"]


def to_safe_name(name: str) -> str:
    """Return an environment's name in a form for the names of files and processes."""
    return re.sub("[^A-Za-z0-9_]+", "_", name)
