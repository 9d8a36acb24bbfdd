"""Find API keys: in the environment, in Hermes Agent's file `.env`, or in the system's keyring.

A key that is set in the environment is used. One that is not is looked for in `~/.hermes/.env`, and
then in the keyring, where `keyring set lachesis TINKER_API_KEY` stores it. Only the names in
`STORED_NAMES` are looked for outside of the environment.
"""

import contextlib
import os
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from lachesis.base.secrets import remember_secret

STORED_NAMES = ("TINKER_API_KEY", "TINKER_BASE_URL", "OPENROUTER_API_KEY", "WANDB_API_KEY")
# The key of an address. An address is taken from the place of its key or from the environment, so
# that a file cannot send the key of another place to a server of its own.
KEY_OF_ADDRESS = {"TINKER_BASE_URL": "TINKER_API_KEY"}
KEYRING_SERVICE = "lachesis"
ENVIRONMENT, KEYRING = "the environment", "the system keyring"
# A locked keyring may ask its user for a password, whom nobody sees at a server.
KEYRING_TIMEOUT_S = 30.0
_is_keyring_usable = True


@dataclass(frozen=True)
class Key:
    """A key, or the address of its server, and where it was found."""

    name: str
    value: str = field(repr=False)
    place: str


def find_key(name: str) -> Key | None:
    """Return a key of this process's user, or None if it is in no place."""
    if value := os.environ.get(name):
        return Key(name, value, ENVIRONMENT)
    if name not in STORED_NAMES:
        return None
    if name in KEY_OF_ADDRESS:
        key = find_key(KEY_OF_ADDRESS[name])
        places = [key.place] if key else []
    else:
        places = [describe_hermes_file(), KEYRING]
    for place in places:
        if value := _read_stored(name, place):
            if name not in KEY_OF_ADDRESS:
                remember_secret(value)
            return Key(name, value, place)
    return None


def read_key(name: str) -> str:
    """Return the value of a key, or an empty text if it is in no place."""
    key = find_key(name)
    if key is None:
        return ""
    return key.value


def adopt_keys(names: Iterable[str] = STORED_NAMES) -> dict[str, str]:
    """Put keys into the environment of this process, whose children get those they need.

    This is not for a process that other programs share, such as an agent's.

    Returns:
        The place of each key that was found.
    """
    # An address is looked for at the place of its key, which is the environment afterwards.
    keys = [key for name in names if (key := find_key(name)) is not None]
    os.environ.update({key.name: key.value for key in keys})
    return {key.name: key.place for key in keys}


def describe_places() -> str:
    """Return the places outside of the environment, as a user may read them."""
    return f"{describe_hermes_file()} or {KEYRING} (`keyring set {KEYRING_SERVICE} NAME`)"


def describe_hermes_file() -> str:
    """Return the path of Hermes Agent's file, with `~` for the home folder."""
    file = _get_hermes_file()
    if file.is_relative_to(Path.home()):
        return f"~/{file.relative_to(Path.home())}"
    return str(file)


def _get_hermes_file() -> Path:
    return Path(os.environ.get("HERMES_HOME") or "~/.hermes").expanduser() / ".env"


def _read_stored(name: str, place: str) -> str | None:
    if place == KEYRING:
        return _read_keyring(name)
    if place == describe_hermes_file():
        return _read_hermes_file(name)
    return None


def _read_hermes_file(name: str) -> str | None:
    """Return a key of the file in which Hermes keeps its keys, or None."""
    from dotenv import dotenv_values

    try:
        text = _get_hermes_file().open(encoding="utf-8", errors="replace")
    except OSError:  # There is none, or it belongs to somebody else.
        return None
    with text:
        return dotenv_values(stream=text, interpolate=False).get(name)


def _read_keyring(name: str) -> str | None:
    """Return a key from the system's keyring, or None also where there is no keyring.

    A keyring that does not answer is not asked again by this process.
    """
    global _is_keyring_usable
    answers: list[str | None] = []

    def ask() -> None:
        import keyring

        with contextlib.suppress(Exception):  # What is raised depends on the system's keyring.
            answers.append(keyring.get_password(KEYRING_SERVICE, name))

    if not _is_keyring_usable:
        return None
    # The thread of a keyring that never answers must not keep the process from ending.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(KEYRING_TIMEOUT_S)
    _is_keyring_usable = bool(answers)
    if answers:
        return answers[0]
    return None
