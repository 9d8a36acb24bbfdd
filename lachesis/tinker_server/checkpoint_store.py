"""Store checkpoints on disk: `tinker://RUN/KIND/NAME` is the folder `ROOT/RUN/KIND/NAME`.

A folder holds the files of an engine and `checkpoint.json`, the record. It is written under another
name and renamed, so a folder that exists is complete. Overwriting renames the old folder to
`.NAME.replaced` until the new one is in place; if it is interrupted in between, the old folder is
still found under that name.
"""

import json
import logging
import os
import shutil
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from lachesis.base.errors import EngineRequestError, StorageError

log = logging.getLogger(__name__)
CHECKPOINT_TYPES = {
    "weights": "training",
    "sampler_weights": "sampler",
    "external_weights": "external",
}
REPLACED_SUFFIX = ".replaced"
# Longest time to live of a checkpoint: ten years.
MAX_TTL_S = 315_360_000


@dataclass(frozen=True)
class CheckpointPath:
    """Hold a parsed `tinker://` path."""

    run: str
    kind: str
    name: str

    @classmethod
    def parse(cls, text: str) -> "CheckpointPath":
        """Parse a path, or raise EngineRequestError."""
        parts = text.removeprefix("tinker://").split("/")
        if (
            not text.startswith("tinker://")
            or len(parts) != 3
            or parts[1] not in CHECKPOINT_TYPES
            or not all(map(_is_plain_name, parts))
        ):
            raise EngineRequestError(
                f"{text!r} is not a checkpoint path; allowed: "
                f"tinker://RUN/({'|'.join(CHECKPOINT_TYPES)})/NAME"
            )
        return cls(*parts)

    def __str__(self) -> str:
        return f"tinker://{self.run}/{self.kind}/{self.name}"


def _is_plain_name(part: str) -> bool:
    return bool(part) and part not in (".", "..") and "\\" not in part and "\0" not in part


class CheckpointStore:
    """Manage the checkpoints in one folder."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def find_folder(self, path: CheckpointPath) -> Path:
        """Return the folder of a checkpoint, which may not exist."""
        folder = self.root / path.run / path.kind / path.name
        replaced = _get_replaced_folder(folder)
        if replaced.exists() and not folder.exists():
            return replaced
        return folder

    def write(
        self,
        path: CheckpointPath,
        write_files: Callable[[Path], None],
        checkpoint_record: dict[str, Any],
        *,
        overwrite: bool = False,
    ) -> int:
        """Write a checkpoint and return its size in bytes.

        Args:
            path: Its name.
            write_files: Called with a new folder that it fills with all files but the record.
            checkpoint_record: Its record.
            overwrite: Whether it may replace one of the same name.

        Raises:
            EngineRequestError: It exists and `overwrite` is false, or its name is not allowed.
            StorageError: The disk refused a write.
        """
        if not _is_plain_name(path.name) or "/" in path.name or path.name.startswith("."):
            raise EngineRequestError(
                f"{path.name!r} is not a checkpoint name; allowed: a name that is not empty, has "
                f"no '/' and does not begin with '.'"
            )
        folder = self.root / path.run / path.kind / path.name
        if self.find_folder(path).exists() and not overwrite:
            raise EngineRequestError(f"{path} already exists; choose another name, or overwrite it")
        temporary = folder.with_name(f".{uuid.uuid4().hex}")
        try:
            temporary.mkdir(parents=True)
            write_files(temporary)
            size = _write_record(temporary, checkpoint_record)
            _flush_to_disk(temporary)
            _replace_folder(temporary, folder)
        except OSError as error:
            shutil.rmtree(temporary, ignore_errors=True)
            raise StorageError(
                f"{folder} could not be written: {error}; check the free space and the permissions "
                "of that folder"
            ) from error
        return size

    def read_record(self, path: CheckpointPath) -> dict[str, Any]:
        """Return the record of a checkpoint.

        Raises:
            EngineRequestError: There is no such checkpoint.
            StorageError: Its record cannot be read.
        """
        for _ in range(2):  # The first try may fall between the two renamings of an overwrite.
            try:
                return _read_json(self.find_folder(path) / "checkpoint.json")
            except (FileNotFoundError, NotADirectoryError):
                continue
        others = ", ".join(self.list_checkpoints()) or "none"
        raise EngineRequestError(f"there is no checkpoint {path}; this engine has {others}")

    def list_checkpoints(self, run: str = "*") -> list[str]:
        """Return the paths of all checkpoints, newest last; expired ones are deleted first."""
        timed_names = []
        for path in self._find_paths(run):
            try:
                checkpoint_record = _read_json(self.find_folder(path) / "checkpoint.json")
            except FileNotFoundError:  # It was deleted after its folder was listed.
                continue
            except StorageError as error:
                log.warning("left out of a listing: %s", error)
                continue
            expires = checkpoint_record.get("expires_at")
            if expires and datetime.fromisoformat(expires) < datetime.now(UTC):
                self.delete(path)
            else:
                timed_names.append((checkpoint_record["time"], str(path)))
        return [name for _, name in sorted(timed_names)]

    def _find_paths(self, run: str) -> set[CheckpointPath]:
        """Return the checkpoints in the folders of a run; those being written are left out."""
        paths = set()
        for file in self.root.glob(f"{run}/*/*/checkpoint.json"):
            name = file.parts[-2]
            if name.startswith("."):
                if not name.endswith(REPLACED_SUFFIX):
                    continue  # It is being written or deleted.
                name = name[1:].removesuffix(REPLACED_SUFFIX)
            paths.add(CheckpointPath(file.parts[-4], file.parts[-3], name))
        return paths

    def delete(self, path: CheckpointPath) -> None:
        """Delete a checkpoint; an interruption leaves it whole or removes it.

        Raises:
            EngineRequestError: There is no such checkpoint.
            StorageError: The disk refused.
        """
        self.read_record(path)
        folder = self.root / path.run / path.kind / path.name
        trash_folder = folder.with_name(f".{uuid.uuid4().hex}")
        try:
            for candidate in (_get_replaced_folder(folder), folder):
                if candidate.exists():
                    # Renamed first, so that an interruption leaves no incomplete checkpoint.
                    os.replace(candidate, trash_folder)
                    shutil.rmtree(trash_folder)
        except OSError as error:
            raise StorageError(
                f"{folder} could not be deleted: {error}; check the permissions of that folder"
            ) from error

    def set_ttl(self, path: CheckpointPath, seconds: int | None) -> None:
        """Let a checkpoint expire after `seconds`, which may be 0, or never if it is None.

        Raises:
            EngineRequestError: The number of seconds is negative or too large.
        """
        if seconds is not None and not 0 <= seconds <= MAX_TTL_S:
            raise EngineRequestError(f"ttl_seconds is {seconds}; allowed: 0 to {MAX_TTL_S}")
        checkpoint_record = self.read_record(path)
        if seconds is not None:
            checkpoint_record["expires_at"] = (
                datetime.now(UTC) + timedelta(seconds=seconds)
            ).isoformat()
        else:
            checkpoint_record["expires_at"] = None
        write_json(self.find_folder(path) / "checkpoint.json", checkpoint_record)

    def set_public(self, path: CheckpointPath, public: bool) -> None:
        """Note whether a checkpoint is published; the token reads it in either case."""
        checkpoint_record = {**self.read_record(path), "public": public}
        write_json(self.find_folder(path) / "checkpoint.json", checkpoint_record)

    def describe(self, name: str) -> dict[str, Any]:
        """Return a checkpoint as the REST interface lists it."""
        path = CheckpointPath.parse(name)
        checkpoint_record = self.read_record(path)
        return {
            "checkpoint_id": f"{path.kind}/{path.name}",
            "checkpoint_type": CHECKPOINT_TYPES[path.kind],
            "time": checkpoint_record["time"],
            "tinker_path": name,
            "size_bytes": checkpoint_record["size_bytes"],
            "public": checkpoint_record.get("public", False),
            "expires_at": checkpoint_record.get("expires_at"),
            "user_metadata": checkpoint_record.get("user_metadata"),
        }

    def save_run(self, run: str, record: dict[str, Any]) -> None:
        """Store the record of a training run."""
        (self.root / run).mkdir(parents=True, exist_ok=True)
        write_json(self.root / run / "run.json", record)

    def list_runs(self) -> list[dict[str, Any]]:
        """Return the records of all training runs, the most recently used first."""
        records = []
        for file in self.root.glob("*/run.json"):
            try:
                records.append(_read_json(file))
            except StorageError as error:
                log.warning("left out of a listing: %s", error)
        return sorted(records, key=lambda record: str(record["last_request_time"]), reverse=True)


def _get_replaced_folder(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}{REPLACED_SUFFIX}")


def _replace_folder(new: Path, folder: Path) -> None:
    """Rename `new` to `folder`; an existing folder is moved away first and removed last."""
    replaced = _get_replaced_folder(folder)
    if folder.exists():
        shutil.rmtree(replaced, ignore_errors=True)  # An interrupted removal may have left it.
        os.replace(folder, replaced)
    try:
        os.replace(new, folder)
    except OSError:
        if replaced.exists():
            os.replace(replaced, folder)
        raise
    shutil.rmtree(replaced, ignore_errors=True)


def _flush_to_disk(folder: Path) -> None:
    """Write files to the disk, so that a power failure after renaming loses nothing."""
    for file in folder.iterdir():
        with file.open("rb") as stream:
            os.fsync(stream.fileno())


def _read_json(file: Path) -> dict[str, Any]:
    """Return the record of a checkpoint from its file.

    A StorageError ends a request at once, where the SDK would repeat a status of 500 for minutes.
    """
    try:
        record: dict[str, Any] = json.loads(file.read_text())
    except (FileNotFoundError, NotADirectoryError):
        raise
    except (OSError, ValueError) as error:
        raise StorageError(
            f"{file} cannot be read: {error}; delete its folder, or restore the file"
        ) from error
    return record


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Replace a JSON file atomically."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{uuid.uuid4().hex[:6]}")
    temporary.write_text(json.dumps(content, indent=2))
    os.replace(temporary, path)


def _write_record(folder: Path, checkpoint_record: dict[str, Any]) -> int:
    """Write the record of a checkpoint, and return the size of the other files."""
    size = sum(file.stat().st_size for file in folder.iterdir())
    checkpoint_record = {
        **checkpoint_record,
        "time": datetime.now(UTC).isoformat(),
        "size_bytes": size,
    }
    (folder / "checkpoint.json").write_text(json.dumps(checkpoint_record, indent=2))
    return size
