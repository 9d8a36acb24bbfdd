"""Files for their owner only, written as a whole, and what the disk says in words."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from lachesis.errors import StorageError


@contextlib.contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """Turn what the disk says into a StorageError that names the path."""
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        raise StorageError(f"{path}: {error.strerror or error}; check the space and the rights of that folder") from error


def write_private(path: Path, text: str) -> None:
    """Replace the file as a whole, readable by its owner only. Raises StorageError."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(3)}")
    with storage_errors(path):
        try:
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with open(descriptor, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(descriptor)  # else the name may be there after a power failure and the content not
            os.replace(temporary, path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise


def owners_only(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


@contextlib.contextmanager
def private() -> Iterator[None]:
    """What is made in the block is for its owner only, also in the process of somebody who uses this as a library."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


def secret_file(path: Path) -> str:
    """What the file holds; made at the first call, for its owner only. Raises StorageError."""
    if not path.is_file():
        made = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(3)}")
        write_private(made, secrets.token_urlsafe(32))
        with storage_errors(path), contextlib.suppress(FileExistsError):
            os.link(made, path)  # the first of several wins
        made.unlink()
    with storage_errors(path):
        found = path.read_text(errors="replace").strip()
    if not found:
        raise StorageError(f"{path} is empty; delete it, and a new one is made")
    return found


def tail(log: Path, lines: int = 20) -> str:
    """The last lines of a log, or "" when there is none."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 65536))
            return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])
    except OSError:
        return ""
