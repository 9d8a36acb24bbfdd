"""Locate the home folder with runs and models, and the project with flows and environments."""

import os
import re
from pathlib import Path

import platformdirs

from lachesis.base.errors import MissingDependencyError

# The name by which pip finds this program; PyPI's `lachesis` is another one.
DISTRIBUTION = "lachesis-rl"
PACKAGE = Path(__file__).resolve().parents[1]


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


def project_dir() -> Path:
    """Return the folder with `flows/`, `tasks/`, `deployments/`, `environments/` and `skills/`.

    It is `$LACHESIS_CHECKOUT` if that is set, else the checkout that this package was loaded from,
    else the copy in the installed package.

    Raises:
        MissingDependencyError: That folder has no `deployments/serve.py`.
    """
    root = _find_project_dir()
    if not _is_project(root):
        raise MissingDependencyError(
            f"the flows are not in {root} (it has no deployments/serve.py); if LACHESIS_CHECKOUT "
            f"is set, unset it or set it to a clone of the repository; else install {DISTRIBUTION} "
            f"again"
        )
    return root


def _find_project_dir() -> Path:
    if configured := os.environ.get("LACHESIS_CHECKOUT"):
        return Path(configured)
    checkout = PACKAGE.parent
    return checkout if _is_project(checkout) else PACKAGE / "project"


def _is_project(folder: Path) -> bool:
    return (folder / "deployments" / "serve.py").is_file()


def environment_dirs() -> list[Path]:
    """Return the folders searched for environments: the project, the home,
    `$LACHESIS_ENVIRONMENTS`.

    That variable holds folders and files, separated as in `$PATH`.
    """
    own = [_find_project_dir() / "environments", home() / "environments"]
    configured = [
        Path(p).expanduser()
        for p in os.environ.get("LACHESIS_ENVIRONMENTS", "").split(os.pathsep)
        if p
    ]
    return [path for path in (*own, *configured) if path.is_dir() or path.suffix == ".py"]


def to_safe_name(name: str) -> str:
    """Return an environment's name in a form for the names of files and processes."""
    return re.sub("[^A-Za-z0-9_]+", "_", name)
