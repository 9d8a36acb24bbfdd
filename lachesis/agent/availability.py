"""Say whether the tools can be offered here: the version of Python, and the keys of the profile."""

from __future__ import annotations

import sys

from lachesis.agent.session import get_default_profile
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
