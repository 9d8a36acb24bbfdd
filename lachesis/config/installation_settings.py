"""Read the settings of this installation from environment variables."""

import os


def get_default_profile() -> str:
    """Return the profile of launches that name none."""
    return os.environ.get("LACHESIS_PROFILE", "embedded")


def is_env_flag_set(name: str) -> bool:
    """Return whether an environment variable is set to anything but 0."""
    return os.environ.get(name, "") not in ("", "0")
