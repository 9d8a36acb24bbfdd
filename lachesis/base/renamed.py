"""Accept the names of earlier releases, with a warning that says the new name."""

from __future__ import annotations

import os
import warnings


class RenamedWarning(FutureWarning):
    """An old name was used; it still works."""


def warn_renamed(old_name: str, new_name: str) -> None:
    """Warn that an old name was used; Python shows equal warnings of a process once."""
    # The warning points to the line that has called this function's caller.
    warnings.warn(
        f"{old_name} is now called {new_name}; the old name still works",
        RenamedWarning,
        stacklevel=3,
    )


def read_renamed_variable(new_name: str, old_name: str, default: str = "") -> str:
    """Return an environment variable, or else the variable of its old name."""
    if new_name not in os.environ and old_name in os.environ:
        warn_renamed(old_name, new_name)
        return os.environ[old_name]
    return os.environ.get(new_name, default)
