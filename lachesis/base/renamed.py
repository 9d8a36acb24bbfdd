"""Accept the names of earlier releases, with a warning that says the new name."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from typing import Any


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


def rename_keys(values: Any, new_names: Mapping[str, str]) -> Any:
    """Return what a file of an earlier release holds with its keys called as they are now.

    A key that stands there under both names keeps the value of the new one. What is not a mapping
    is returned as it is.
    """
    if not isinstance(values, Mapping) or values.keys().isdisjoint(new_names):
        return values
    old_values = {
        new: values[old] for old, new in new_names.items() if old in values and new not in values
    }
    return {key: value for key, value in values.items() if key not in new_names} | old_values


def make_key_renamer(new_names: Mapping[str, str]) -> Callable[[Any], Any]:
    """Return a function that renames keys, for a pydantic model to call before it validates."""

    def rename(values: Any) -> Any:
        return rename_keys(values, new_names)

    return rename
