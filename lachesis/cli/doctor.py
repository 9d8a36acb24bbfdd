"""What this machine has, what is missing, and how to get it."""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import dataclass

from lachesis.base import paths
from lachesis.base.errors import LachesisError
from lachesis.config.profiles import list_missing_modules
from lachesis.config.run_config import PROFILES
from lachesis.orchestration import launcher
from lachesis.runs import cleanup
from lachesis.runs.store import RunStore
from lachesis.service import Service
from lachesis.tiny_model import build


@dataclass(frozen=True)
class Check:
    """One finding. What is not `needed` only opens further possibilities."""

    name: str
    ok: bool
    found: str
    remedy: str = ""
    needed: bool = True


def examine() -> list[Check]:
    own = [_python(), _checkout(), _embedded(), _mcp(), _model(), _server(), *_keys(), _environments(), _disk()]
    return [*own, *(Check("left behind", False, one.description, "lachesis doctor --fix") for one in leftovers())]


def leftovers() -> list[cleanup.Leftover]:
    """What may be ended; nothing where there is no home yet."""
    return cleanup.find_all_leftovers(RunStore()) if paths.home().is_dir() else []


def _python() -> Check:
    version = ".".join(map(str, sys.version_info[:3]))
    return Check("Python 3.11 or newer", sys.version_info >= (3, 11), version, "install Python 3.11, 3.12 or 3.13")


def _checkout() -> Check:
    try:
        return Check("checkout with flows", True, str(paths.checkout_dir()))
    except LachesisError as error:
        return Check("checkout with flows", False, str(error), "clone the repository and set LACHESIS_CHECKOUT to it")


def _embedded() -> Check:
    absent = list_missing_modules(("torch", "transformers", "peft", "safetensors"))
    found = f"without {', '.join(absent)}" if absent else "installed"
    return Check("embedded engine", not absent, found, "pip install 'lachesis[embedded]'", needed=False)


def _mcp() -> Check:
    absent = list_missing_modules(["mcp"])
    found = "not installed" if absent else "installed"
    return Check("MCP server", not absent, found, "pip install 'lachesis[mcp]'", needed=False)


def _model() -> Check:
    path = build.get_tiny_model_path(build.TinyModelRecipe())
    found = path.is_dir()
    return Check("tiny model", found, str(path) if found else "not built", "lachesis model build", needed=False)


def _server() -> Check:
    server = launcher.find_running_server()
    return Check(
        "Prefect server", server is not None, server["ui_url"] if server else "not running", "lachesis serve", needed=False
    )


def _keys() -> list[Check]:
    checks = []
    for profile in PROFILES.values():
        if profile.required_keys:
            missing = [key for key in profile.required_keys if not os.environ.get(key)]
            found = f"without {', '.join(missing)}" if missing else "set"
            remedy = f"set {', '.join(missing)} in the environment"
            checks.append(Check(f"keys of profile {profile.name}", not missing, found, remedy, needed=False))
    return checks


def _environments() -> Check:
    scan = Service().environments()
    found = f"{len(scan.environments)} found"
    if scan.problems:
        found += "; not readable: " + "; ".join(f"{file} ({reason})" for file, reason in scan.problems.items())
    return Check("environments", bool(scan.environments) and not scan.problems, found, "see environments/README.md")


def _disk() -> Check:
    home = paths.home()
    place = next(folder for folder in (home, *home.parents) if folder.exists())
    free = shutil.disk_usage(place).free / 2**30
    writable = os.access(place, os.W_OK)
    found = f"{free:.1f} GiB free at {home}{'' if writable else ', not writable'}"
    return Check("home folder", writable and free > 1, found, "free some space, or set LACHESIS_HOME to another folder")
