"""Define the profiles, which say where training happens, and check what each needs on this machine.

embedded   the engine of this project on this machine; no key, no cost
tinker     the Tinker cloud
custom     any other server that speaks the Tinker protocol
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import yaml

from lachesis.base import paths
from lachesis.base.api_keys import STORED_NAMES, adopt_keys, describe_places, read_key
from lachesis.base.errors import ConfigError, MissingKeyError, make_embedded_error, shorten
from lachesis.config.backends import check_backend

ProfileName = Literal["embedded", "tinker", "custom"]
SECTION_NAMES = ("env", "openai", "tinker", "limits", "rollouts")


@dataclass(frozen=True)
class Profile:
    """Describe a place where training happens."""

    name: ProfileName
    description: str
    values: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Values of fields by section and name."""
    required_keys: tuple[str, ...] = ()
    """Environment variables that training needs."""

    @property
    def is_paid(self) -> bool:
        """Return whether somebody may be billed, which is so for all servers that require a key."""
        return bool(self.required_keys)


PROFILES: dict[str, Profile] = {
    "embedded": Profile(
        "embedded",
        "the engine of this project on this machine; no key, no cost",
        values={
            "env": {
                "total_steps": 300,
                "use_wandb": False,
                "max_token_length": 128,
                "max_num_workers": 64,
                "steps_per_eval": 25,
                "max_batches_offpolicy": 1,
                "worker_timeout": 600,
            },
            "openai": {"num_requests_for_eval": 4, "timeout": 600},
            "tinker": {
                "learning_rate": 1.5e-3,
                "max_token_trainer_length": 512,
                "final_evaluation": True,
            },
        },
    ),
    "tinker": Profile("tinker", "the Tinker cloud", required_keys=("TINKER_API_KEY",)),
    "custom": Profile(
        "custom",
        "another server that speaks the Tinker protocol",
        required_keys=("TINKER_BASE_URL", "TINKER_API_KEY"),
    ),
}


def load_profile_values(profile: str, home: Path | None = None) -> dict[str, dict[str, Any]]:
    """Return a profile's values, overridden by the operator's `$LACHESIS_HOME/profiles.yaml`.

    That file has the form

        tinker: {tinker: {lora_rank: 16}, env: {total_steps: 500}}

    Raises:
        ConfigError: There is no such profile, or the file cannot be read or has another form.
    """
    if profile not in PROFILES:
        raise ConfigError(
            f"there is no profile {shorten(repr(profile), 60)}; allowed: {', '.join(PROFILES)}",
            available=list(PROFILES),
        )
    values = {name: dict(section) for name, section in PROFILES[profile].values.items()}
    file = (home or paths.home()) / "profiles.yaml"
    if file.is_file():
        try:
            for name, section in (
                (yaml.safe_load(file.read_text()) or {}).get(profile) or {}
            ).items():
                if name not in SECTION_NAMES:
                    raise ValueError(
                        f"there is no section {name}; allowed: {', '.join(SECTION_NAMES)}"
                    )
                values.setdefault(name, {}).update(section)
        except OSError as error:
            raise ConfigError(f"{file} cannot be read: {error.strerror}") from error
        except (yaml.YAMLError, AttributeError, TypeError, ValueError, RecursionError) as error:
            raise ConfigError(
                f"{file} must have the form PROFILE: {{SECTION: {{FIELD: VALUE}}}}: {error}"
            ) from error
    return values


def check_profile(
    profile: str, environ: Mapping[str, str] | None = None, *, backend: str = ""
) -> None:
    """Raise an error that names what the profile lacks on this machine.

    With a back end no server needs to be named; its own environment is needed instead.

    Raises:
        ConfigError: There is no such profile.
        MissingKeyError: A key is not set.
        MissingDependencyError: A package is not installed.
    """
    load_profile_values(profile)
    if backend:
        check_backend(backend)
        return
    missing = list_missing_keys(profile, environ)
    if missing:
        raise MissingKeyError(
            f"{describe_missing_keys(profile, missing)}; then start it again, because its child "
            "processes train",
            missing=missing,
        )
    if profile == "embedded":
        check_embedded()


def describe_missing_keys(profile: str, missing: Sequence[str]) -> str:
    """Say which keys a start on a profile lacks, and where they can be set."""
    return (
        f"profile {profile} needs {', '.join(missing)} in the environment of `lachesis serve`, in "
        f"{describe_places()}"
    )


def adopt_profile_keys(profile: str, *, backend: str = "") -> None:
    """Put what a paid profile needs into this process's environment, for the SDK and for children.

    A back end at another place may need a key, which is then passed on to it.

    Raises:
        MissingKeyError: A key is in no place.
    """
    if backend:
        adopt_keys(("TINKER_API_KEY",))
    elif profile in PROFILES and PROFILES[profile].is_paid:
        check_profile(profile)
        adopt_keys(PROFILES["custom"].required_keys)


def check_embedded() -> None:
    """Raise MissingDependencyError when the embedded engine cannot run here."""
    missing = list_missing_modules(("torch", "transformers", "peft"))
    if missing:
        raise make_embedded_error("profile embedded", ", ".join(missing))


def get_endpoint_key_name(environ: Mapping[str, str] | None = None) -> str:
    """Return the name of the key for models tested at an endpoint.

    It is that of OpenRouter unless `$OPENAI_BASE_URL` names another endpoint.
    """
    if _has_key("OPENAI_BASE_URL", environ):
        return "OPENAI_API_KEY"
    return "OPENROUTER_API_KEY"


def has_endpoint_key(environ: Mapping[str, str] | None = None) -> bool:
    """Return whether there is a key for models tested at an endpoint."""
    return _has_key(get_endpoint_key_name(environ), environ)


def check_endpoint(models: list[str], environ: Mapping[str, str] | None = None) -> None:
    """Raise MissingKeyError when the key for testing these models at an endpoint is missing."""
    key = get_endpoint_key_name(environ)
    if _has_key(key, environ):
        return
    places = "in the environment"
    if key in STORED_NAMES:
        places += f", in {describe_places()}"
    raise MissingKeyError(
        f"testing {', '.join(models)[:200]} needs {key} {places}; then start `lachesis serve` "
        "again. A model on this machine (`embedded:NAME`) needs no key, and OPENAI_BASE_URL with "
        "OPENAI_API_KEY selects any other endpoint of that protocol",
        missing=[key],
    )


def list_missing_keys(profile: str, environ: Mapping[str, str] | None = None) -> list[str]:
    """Return the keys that the profile needs and that are not set."""
    return [key for key in PROFILES[profile].required_keys if not _has_key(key, environ)]


def _has_key(name: str, environ: Mapping[str, str] | None) -> bool:
    """Return whether a key is among these variables; without any, whether this process finds it."""
    if environ is None:
        return bool(read_key(name))
    return bool(environ.get(name))


def list_all_keys() -> list[str]:
    """Return all environment variables that a profile or an endpoint needs."""
    profile_keys = {key for profile in PROFILES.values() for key in profile.required_keys}
    return sorted(profile_keys | {"OPENROUTER_API_KEY", "OPENAI_API_KEY", "OPENAI_BASE_URL"})


def list_missing_modules(names: Iterable[str]) -> list[str]:
    """Return the modules that are not installed, without importing any."""
    return [name for name in names if find_spec(name) is None]
