"""Say whether the tools can be offered here: the version of Python, and the keys of the profile."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

from lachesis.agent.session import get_default_profile
from lachesis.base import paths
from lachesis.base.errors import LachesisError
from lachesis.base.keys import read_key
from lachesis.config.profiles import PROFILES, list_missing_keys
from lachesis.orchestration import server

MIN_PYTHON = (3, 11)


def check_rl_python_version() -> bool:
    """Return whether this Python is new enough."""
    return sys.version_info >= MIN_PYTHON


def get_missing_keys() -> list[str]:
    """Return the names of the keys that the profile of $LACHESIS_PROFILE needs and that are not
    set.
    """
    profile = get_default_profile()
    if profile not in PROFILES:
        return []
    return [key for key in list_missing_keys(profile, server.read_key_names()) if not read_key(key)]


def check_rl_api_keys() -> bool:
    """Return whether the tools can be offered: Python is new enough and the profile's keys are
    set.
    """
    return check_rl_python_version() and not get_missing_keys()


def find_skill() -> Path | None:
    """Return the file of the skill that teaches an agent these tools, if the project is here."""
    with contextlib.suppress(LachesisError):
        file = paths.project_dir() / "skills" / "rl-training" / "SKILL.md"
        return file if file.is_file() else None
    return None
