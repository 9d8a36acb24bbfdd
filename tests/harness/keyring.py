"""A keyring in a file, in place of the one of a desktop, that can misbehave on command.

`PYTHON_KEYRING_BACKEND=tests.harness.keyring.FileKeyring` makes the real library use it, in
children too. `$KEYRING_FILE` is a JSON object of names and values; the word `locked` in its place
raises as a locked keyring does, and `silent` never answers.
"""

import json
import os
import time
from pathlib import Path

from keyring.backend import KeyringBackend
from keyring.errors import KeyringLocked

from lachesis.base.api_keys import KEYRING_SERVICE


class FileKeyring(KeyringBackend):
    """Read passwords from a file."""

    priority = 1  # type: ignore[assignment]  # The library reads a number here.

    def get_password(self, service: str, username: str) -> str | None:
        with open(os.environ["KEYRING_FILE"] + ".asked", "a") as asked:
            asked.write(f"{username}\n")
        content = json.loads(Path(os.environ["KEYRING_FILE"]).read_text())
        if content == "locked":
            raise KeyringLocked("the user has closed the window")
        if content == "silent":
            time.sleep(60)
        assert service == KEYRING_SERVICE
        return dict(content).get(username)

    def set_password(self, service: str, username: str, password: str) -> None:
        raise NotImplementedError
