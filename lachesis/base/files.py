"""Write whole, private files and folders, and turn errors of the disk into words."""

import contextlib
import functools
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from lachesis.base.errors import LachesisError, StorageError

# Changes are written in milliseconds, so a lock is soon free.
LOCK_POLL_S = 0.01


@contextlib.contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """Turn an OSError inside the block into a StorageError that names the path."""
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        raise StorageError(
            f"{path}: {error.strerror or error}; check the free space and the permissions of that "
            f"folder"
        ) from error


def write_private(path: Path, text: str) -> None:
    """Replace a file atomically with one that only its owner can read.

    Raises:
        StorageError: The file cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(3)}")
    with storage_errors(path):
        try:
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with open(descriptor, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                # Without this, a power failure could leave the new name with no content.
                os.fsync(descriptor)
            os.replace(temporary, path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise


@contextlib.contextmanager
def create_folder_atomically(target: Path) -> Iterator[Path]:
    """Yield an empty folder that becomes `target` when the block ends without an exception.

    Args:
        target: A folder that does not exist yet, or an empty one.

    Raises:
        StorageError: The folder cannot be written. Nothing is left of it, so the caller can retry.
    """
    exists = target.is_dir()  # It may be a mount point, so it is filled and not replaced.
    parent = target if exists else target.parent
    # Beside the target, because a rename between file systems is not atomic.
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
    """Open a file that only its owner can read; an `opener` for the built-in function `open`."""
    return os.open(path, flags, 0o600)


def make_private_folder(folder: Path) -> None:
    """Create a folder and its missing parents, accessible by their owner only."""
    if not folder.is_dir():
        make_private_folder(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)


def copy_private(source: Path, target: Path) -> None:
    """Copy the content of a file to one that only its owner can read."""
    with source.open("rb") as old, open(target, "wb", opener=open_owner_only) as new:
        shutil.copyfileobj(old, new)


_given_contents: dict[Path, bytes] = {}


def give_content(file: Path, content: bytes) -> None:
    """Let `read_cached` use the content of a file that the parent of this process has read."""
    _given_contents[file] = content


def read_cached(file: Path) -> bytes:
    """Return the content of a small file, which is opened again only after it has changed.

    Raises:
        OSError: The file cannot be read.
    """
    if file in _given_contents:
        return _given_contents[file]
    status = file.stat()
    return _read_content(file, (status.st_mtime_ns, status.st_ctime_ns, status.st_size))


@functools.lru_cache(maxsize=256)
def _read_content(file: Path, state: tuple[int, int, int]) -> bytes:
    return file.read_bytes()


def read_or_create_secret(path: Path) -> str:
    """Return the secret in a file; create the file with a random secret, readable by its owner
    only, if it is missing.

    Raises:
        StorageError: The file cannot be read or written, or is empty.
    """
    if not path.is_file():
        temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(3)}")
        write_private(temporary, secrets.token_urlsafe(32))
        with storage_errors(path), contextlib.suppress(FileExistsError):
            os.link(temporary, path)  # Of several processes at once the first one wins.
        temporary.unlink()
    with storage_errors(path):
        secret = path.read_text(errors="replace").strip()
    if not secret:
        raise StorageError(f"{path} is empty; delete it, and a new secret will be created")
    return secret


def read_last_lines(log: Path, num_lines: int = 20) -> str:
    """Return the last lines of a log file, or an empty text when it cannot be read."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 65536))
            return "\n".join(file.read().decode(errors="replace").splitlines()[-num_lines:])
    except OSError:
        return ""


@contextlib.contextmanager
def hold_file_lock(
    file: Path, *, timeout_s: float | None = None, timeout_error: LachesisError | None = None
) -> Iterator[None]:
    """Hold a lock against other processes and threads during the block; children do not inherit it.

    Args:
        file: The file to lock; its folder exists.
        timeout_s: How long to wait for the lock; by default as long as it takes.
        timeout_error: What to raise after that time.

    Raises:
        StorageError: The file cannot be opened.
    """
    # Loaded here, because most commands of the program lock nothing.
    from filelock import FileLock, Timeout

    lock = FileLock(file, timeout=-1 if timeout_s is None else timeout_s, mode=0o600)
    with storage_errors(file):
        try:
            lock.acquire(poll_interval=LOCK_POLL_S)
        except Timeout:
            raise timeout_error or StorageError(f"{file} is locked by another process") from None
    try:
        yield
    finally:
        lock.release()
