"""Whether this machine has what a profile needs."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from importlib.util import find_spec

from lachesis import config as configuration
from lachesis.config import PROFILES
from lachesis.errors import MissingDependencyError, MissingKeyError


def check_profile(profile: str, environ: Mapping[str, str] | None = None) -> None:
    """Raises ConfigError, MissingKeyError or MissingDependencyError, which name what the profile lacks here."""
    configuration.profile_values(profile)
    missing = missing_keys(profile, environ)
    if missing:
        raise MissingKeyError(
            f"profile {profile} needs {', '.join(missing)} in the environment of `lachesis serve`, whose children train",
            missing=missing,
        )
    if profile == "embedded":
        absent = missing_modules(("torch", "transformers", "peft"))
        if absent:
            raise MissingDependencyError(
                f"profile embedded needs {', '.join(absent)}, which is not installed: pip install 'lachesis[embedded]'"
            )


def missing_keys(profile: str, environ: Mapping[str, str] | None = None) -> list[str]:
    """The names of the keys that the profile needs and that are not there."""
    present = os.environ if environ is None else environ
    return [key for key in PROFILES[profile].keys if not present.get(key)]


def all_keys() -> list[str]:
    """Every key that some profile needs."""
    return sorted({key for profile in PROFILES.values() for key in profile.keys})


def missing_modules(names: Iterable[str]) -> list[str]:
    """Those that cannot be imported, without importing them."""
    return [name for name in names if find_spec(name) is None]
