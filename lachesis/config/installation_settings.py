"""Read environment variables that switch something on."""

from __future__ import annotations

import os


def is_env_flag_set(name: str) -> bool:
    """Return whether an environment variable is set to anything but 0."""
    return os.environ.get(name, "") not in ("", "0")
