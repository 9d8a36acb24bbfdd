"""The bearer token of the HTTP surfaces for agents: one per home."""

from __future__ import annotations

import os

from lachesis.base import paths
from lachesis.base.files import read_or_create_secret, storage_errors


def load_or_create_token() -> str:
    """`$LACHESIS_TOKEN`, else that of this home, which is made at the first call. Raises
    StorageError.
    """
    configured_token = os.environ.get("LACHESIS_TOKEN")
    if configured_token:
        return configured_token
    file = paths.home() / "token"
    with storage_errors(file):
        file.parent.mkdir(parents=True, exist_ok=True)
    return read_or_create_secret(file)
