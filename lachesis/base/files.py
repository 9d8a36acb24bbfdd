"""Files for their owner only, written as a whole, and what the disk says in words."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from lachesis.base.errors import StorageError


@contextlib.contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """Turn what the disk says into a StorageError that names the path."""
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        raise StorageError(
            f"{path}: {error.strerror or error}; check the space and the rights of that folder"
        ) from error


def write_private(path: Path, text: str) -> None:
    """Replace the file as a whole, readable by its owner only. Raises StorageError."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(3)}")
    with storage_errors(path):
        try:
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with open(descriptor, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                # else the name may be there after a power failure and the content not
                os.fsync(descriptor)
            os.replace(temporary, path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise


@contextlib.contextmanager
def create_folder_atomically(target: Path) -> Iterator[Path]:
    """Yield a folder to fill, which becomes `target` when the block ends; `target` must be new or
    an empty folder.

    When the block raises, nothing is left, so that the caller can try again. Raises StorageError.
    """
    exists = target.is_dir()  # it may be a mount point or in use, and is kept
    parent = target if exists else target.parent
    temporary = parent / f".{target.name or 'new'}.{os.getpid()}.{secrets.token_hex(3)}"
    try:
        with storage_errors(target):
            temporary.mkdir(parents=True)
        yield temporary
        with storage_errors(target):
            if exists:
                for entry in sorted(temporary.iterdir()):
                    os.replace(entry, target / entry.name)
            else:
                os.replace(temporary, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def open_owner_only(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def make_private_folder(folder: Path) -> None:
    """Make the folder and the missing ones above it, for their owner only."""
    if not folder.is_dir():
        make_private_folder(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)


def copy_private(source: Path, target: Path) -> None:
    """Copy the file's content to a file that only its owner can read."""
    with source.open("rb") as old, open(target, "wb", opener=open_owner_only) as new:
        shutil.copyfileobj(old, new)


def read_or_create_secret(path: Path) -> str:
    """What the file holds; made at the first call, for its owner only. Raises StorageError."""
    if not path.is_file():
        temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(3)}")
        write_private(temporary, secrets.token_urlsafe(32))
        with storage_errors(path), contextlib.suppress(FileExistsError):
            os.link(temporary, path)  # the first of several wins
        temporary.unlink()
    with storage_errors(path):
        secret = path.read_text(errors="replace").strip()
    if not secret:
        raise StorageError(f"{path} is empty; delete it, and a new one is made")
    return secret


def read_last_lines(log: Path, num_lines: int = 20) -> str:
    """The last lines of a log, or "" when there is none."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 65536))
            return "\n".join(file.read().decode(errors="replace").splitlines()[-num_lines:])
    except OSError:
        return ""
