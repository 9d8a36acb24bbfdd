"""Check what this machine has and what is missing, and say how to get it."""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import dataclass

from lachesis.base import paths
from lachesis.base.errors import LachesisError
from lachesis.config.profiles import PROFILES, list_missing_modules
from lachesis.orchestration.server import find_running_server
from lachesis.runs import cleanup
from lachesis.runs.store import RunStore
from lachesis.service import LachesisService
from lachesis.tiny_model import build


@dataclass(frozen=True)
class DoctorCheck:
    """One finding. A check that is not `needed` only enables further features."""

    name: str
    ok: bool
    found: str
    remedy: str = ""
    needed: bool = True


def run_checks() -> list[DoctorCheck]:
    """Return the result of every check of this machine."""
    machine_checks = [
        _check_python(),
        _check_project(),
        _check_embedded_engine(),
        _check_mcp(),
        _check_tiny_model(),
        _check_server(),
        *_check_keys(),
        _check_environments(),
        _check_disk(),
    ]
    return [
        *machine_checks,
        *(
            DoctorCheck("left behind", False, leftover.description, "lachesis doctor --fix")
            for leftover in find_home_leftovers()
        ),
    ]


def find_home_leftovers() -> list[cleanup.Leftover]:
    """Return what dead runs have left behind; an empty list if there is no home yet."""
    if paths.home().is_dir():
        return cleanup.find_all_leftovers(RunStore())
    return []


def _check_python() -> DoctorCheck:
    version = ".".join(map(str, sys.version_info[:3]))
    return DoctorCheck(
        "Python 3.11 or newer",
        sys.version_info >= (3, 11),
        version,
        "install Python 3.11, 3.12 or 3.13",
    )


def _check_project() -> DoctorCheck:
    try:
        return DoctorCheck("flows", True, str(paths.project_dir()))
    except LachesisError as error:
        return DoctorCheck(
            "flows", False, str(error), f"pip install --force-reinstall {paths.DISTRIBUTION}"
        )


def _check_embedded_engine() -> DoctorCheck:
    missing = list_missing_modules(("torch", "transformers", "peft", "safetensors"))
    state = f"without {', '.join(missing)}" if missing else "installed"
    return DoctorCheck(
        "embedded engine", not missing, state, "pip install 'lachesis-rl[embedded]'", needed=False
    )


def _check_mcp() -> DoctorCheck:
    missing = list_missing_modules(["mcp"])
    state = "not installed" if missing else "installed"
    return DoctorCheck(
        "MCP server", not missing, state, "pip install 'lachesis-rl[mcp]'", needed=False
    )


def _check_tiny_model() -> DoctorCheck:
    path = build.get_tiny_model_path(build.TinyModelRecipe())
    is_built = path.is_dir()
    return DoctorCheck(
        "tiny model",
        is_built,
        str(path) if is_built else "not built",
        "lachesis model build",
        needed=False,
    )


def _check_server() -> DoctorCheck:
    server = find_running_server()
    return DoctorCheck(
        "Prefect server",
        server is not None,
        server["ui_url"] if server else "not running",
        "lachesis serve",
        needed=False,
    )


def _check_keys() -> list[DoctorCheck]:
    checks = []
    for profile in PROFILES.values():
        if profile.required_keys:
            missing = [key for key in profile.required_keys if not os.environ.get(key)]
            state = f"without {', '.join(missing)}" if missing else "set"
            remedy = f"set {', '.join(missing)} in the environment"
            checks.append(
                DoctorCheck(
                    f"keys of profile {profile.name}", not missing, state, remedy, needed=False
                )
            )
    return checks


def _check_environments() -> DoctorCheck:
    scan = LachesisService().list_environments()
    state = f"{len(scan.environments)} found"
    if scan.problems:
        state += "; not readable: " + "; ".join(
            f"{file} ({reason})" for file, reason in scan.problems.items()
        )
    return DoctorCheck(
        "environments",
        bool(scan.environments) and not scan.problems,
        state,
        "see environments/README.md",
    )


def _check_disk() -> DoctorCheck:
    home = paths.home()
    existing_folder = next(folder for folder in (home, *home.parents) if folder.exists())
    free_gib = shutil.disk_usage(existing_folder).free / 2**30
    is_writable = os.access(existing_folder, os.W_OK)
    state = f"{free_gib:.1f} GiB free at {home}{'' if is_writable else ', not writable'}"
    return DoctorCheck(
        "home folder",
        is_writable and free_gib > 1,
        state,
        "free some space, or set LACHESIS_HOME to another folder",
    )
