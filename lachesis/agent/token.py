"""The bearer token of the HTTP surfaces for agents: one per home."""

from __future__ import annotations

import contextlib
import os
import secrets

from lachesis import paths
from lachesis.errors import StorageError
from lachesis.runs import storage_errors, write_private


def own_token() -> str:
    """`$LACHESIS_TOKEN`, else that of this home, which is made at the first call. Raises StorageError."""
    named = os.environ.get("LACHESIS_TOKEN")
    if named:
        return named
    file = paths.home() / "token"
    with storage_errors(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        made = file.with_name(f".token.{secrets.token_hex(4)}")
        write_private(made, secrets.token_urlsafe(32))
        with contextlib.suppress(FileExistsError):
            os.link(made, file)  # the first of several wins
        made.unlink()
        token = file.read_text().strip()
    if not token:
        raise StorageError(f"{file} is empty; delete it, and a new token is made")
    return token
