"""Whether this machine has what a profile needs."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from importlib.util import find_spec

from lachesis.base.errors import MissingDependencyError, MissingKeyError
from lachesis.config import run_config as run_config
from lachesis.config.run_config import PROFILES


def check_profile(profile: str, environ: Mapping[str, str] | None = None) -> None:
    """Raises ConfigError, MissingKeyError or MissingDependencyError, which name what the profile
    lacks here.
    """
    run_config.load_profile_values(profile)
    missing = list_missing_keys(profile, environ)
    if missing:
        raise MissingKeyError(
            f"profile {profile} needs {', '.join(missing)} in the environment of `lachesis serve`, whose children train; "
            "start it with them",
            missing=missing,
        )
    if profile == "embedded":
        check_embedded()


def check_embedded() -> None:
    """Raises MissingDependencyError when the embedded engine cannot run here."""
    missing = list_missing_modules(("torch", "transformers", "peft"))
    if missing:
        raise MissingDependencyError(
            f"profile embedded needs {', '.join(missing)}, which is not installed: pip install 'lachesis[embedded]'"
        )


def get_endpoint_key_name(environ: Mapping[str, str]) -> str:
    """The name of the key for models that are tested at an endpoint: $OPENAI_BASE_URL when it is
    set, else OpenRouter.
    """
    return "OPENAI_API_KEY" if environ.get("OPENAI_BASE_URL") else "OPENROUTER_API_KEY"


def check_endpoint(models: list[str], environ: Mapping[str, str] | None = None) -> None:
    """Raises MissingKeyError when these models at an endpoint cannot be asked."""
    variables = os.environ if environ is None else environ
    key = get_endpoint_key_name(variables)
    if not variables.get(key):
        raise MissingKeyError(
            f"testing {', '.join(models)[:200]} needs {key} in the environment of `lachesis serve`; a model of this machine "
            "(`embedded:NAME`) needs no key, and OPENAI_BASE_URL with OPENAI_API_KEY stands for any endpoint of that protocol",
            missing=[key],
        )


def list_missing_keys(profile: str, environ: Mapping[str, str] | None = None) -> list[str]:
    """The names of the keys that the profile needs and that are not there."""
    variables = os.environ if environ is None else environ
    return [key for key in PROFILES[profile].required_keys if not variables.get(key)]


def list_all_keys() -> list[str]:
    """Every variable that a profile or the endpoint of an inference test needs."""
    profile_keys = {key for profile in PROFILES.values() for key in profile.required_keys}
    return sorted(profile_keys | {"OPENROUTER_API_KEY", "OPENAI_API_KEY", "OPENAI_BASE_URL"})


def list_missing_modules(names: Iterable[str]) -> list[str]:
    """Those that cannot be imported, without importing them."""
    return [name for name in names if find_spec(name) is None]
