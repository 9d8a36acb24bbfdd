"""Read the bearer token that protects the HTTP interfaces for agents; each home has one."""

from __future__ import annotations

import os

from lachesis.base import paths
from lachesis.base.files import read_or_create_secret, storage_errors


def load_or_create_token() -> str:
    """Return `$LACHESIS_TOKEN`, or else the token of this home, which is created on first use.

    Raises:
        StorageError: The token file cannot be read or written.
    """
    configured_token = os.environ.get("LACHESIS_TOKEN")
    if configured_token:
        return configured_token
    file = paths.home() / "token"
    with storage_errors(file):
        file.parent.mkdir(parents=True, exist_ok=True)
    return read_or_create_secret(file)


def describe_token_location() -> str:
    """Return where a person finds the token."""
    if os.environ.get("LACHESIS_TOKEN"):
        return "$LACHESIS_TOKEN"
    return str(paths.home() / "token")
