"""Store runs on disk: one folder each, with a record that is replaced atomically.

runs/{run_id}/run.json  config.yaml  metrics.jsonl  checkpoints/  logs/  engine/  evaluation/
"""

import contextlib
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from pydantic import ValidationError

from lachesis.base import paths
from lachesis.base.errors import StorageError, UnknownRunError, shorten
from lachesis.base.files import hold_file_lock, storage_errors, write_private
from lachesis.config.run_config import RunConfig
from lachesis.runs.folder import RECORD_NAME, RunDir
from lachesis.runs.record import RunRecord, ServiceRecord

# A record is written in milliseconds; a process that holds it longer has been stopped.
LOCK_S = 10.0


# Records by their files, each with the inode, the time of change and the size that its file had. A
# program that goes on running opens a record again only after it was changed.
_kept_records: dict[str, tuple[tuple[int, int, int], RunRecord]] = {}


def _read_record(file: str) -> RunRecord:
    """Return the record in a file.

    Raises:
        OSError: The file cannot be read.
        ValidationError: It is damaged.
    """
    state = _read_state(file)
    kept = _kept_records.get(file)
    if kept is None or kept[0] != state:
        with open(file, "rb") as stream:
            record = RunRecord.model_validate_json(stream.read())
        kept = _kept_records[file] = (state, record)
    return kept[1]


def _read_state(file: str) -> tuple[int, int, int]:
    status = os.stat(file)
    return status.st_ino, status.st_mtime_ns, status.st_size


class RunStore:
    """Manage all runs of a home; readers see a record before or after each change."""

    def __init__(self, home: Path | None = None) -> None:
        self.home = home or paths.home()
        self.root = paths.runs_dir(self.home)

    def dir(self, run_id: str) -> RunDir:
        """Return the paths of a run."""
        return RunDir(self.root, run_id)

    def new_id(self) -> str:
        """Return a new run id of eight hexadecimal digits."""
        return secrets.token_hex(4)

    def create(self, record: RunRecord, config_yaml: str = "") -> RunDir:
        """Create the run's folder, its configuration, and last its record.

        Raises:
            StorageError: The disk refused a write.
        """
        run_dir = self.dir(record.run_id)
        with storage_errors(run_dir.path):
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            for path in (run_dir.path, run_dir.logs, run_dir.checkpoints):
                path.mkdir(mode=0o700, exist_ok=True)
        write_private(run_dir.config, config_yaml)
        # A folder is a run once it has a record, so the record is written last.
        self._write(record)
        return run_dir

    def _write(self, record: RunRecord) -> None:
        """Replace the file of a record, which is locked, with a later time of change than before.

        The clock may stand still between two writes, and readers know a change by the time.
        """
        file, text = self.dir(record.run_id).record, record.model_dump_json(indent=2)
        before_ns = file.stat().st_mtime_ns if file.exists() else 0
        write_private(file, text)
        with storage_errors(file):
            if file.stat().st_mtime_ns <= before_ns:
                os.utime(file, ns=(before_ns + 1, before_ns + 1))
            state = _read_state(str(file))
            _kept_records[str(file)] = (state, RunRecord.model_validate_json(text))

    def discard(self, run_id: str) -> None:
        """Remove a run that was never submitted."""
        shutil.rmtree(self.dir(run_id).path, ignore_errors=True)

    def load(self, run_id: str) -> RunRecord:
        """Return the record of a run.

        Raises:
            UnknownRunError: There is no such run; the message names those that exist.
            StorageError: The record is damaged.
        """
        self._require_run(run_id)
        file = self.dir(run_id).record
        with storage_errors(file):
            try:
                return _read_record(str(file))
            except ValidationError as error:
                raise StorageError(
                    f"{file} is damaged ({error.errors()[0]['msg']}); the run's other files are "
                    f"not affected"
                ) from error

    def _require_run(self, run_id: str) -> None:
        """Raise UnknownRunError unless the id is that of a run."""
        if re.fullmatch(r"[0-9a-f]{8}", run_id) and self.dir(run_id).record.is_file():
            return
        records = self.all()
        run_ids = ", ".join(record.run_id for record in records[:10]) or "none"
        raise UnknownRunError(
            f"there is no run {shorten(repr(run_id), 60)}; existing runs: {run_ids} (rl_list_runs "
            "or `lachesis runs` lists all)",
            active_runs=[record.run_id for record in records if not record.has_ended],
        )

    def update(self, run_id: str, *, if_attempt: int | None = None, **changes: object) -> RunRecord:
        """Change these fields of the record, and keep what other processes have changed meanwhile.

        With `if_attempt` nothing changes if the run is at another attempt by now.
        """

        def make_changes(record: RunRecord) -> Mapping[str, object]:
            return {} if if_attempt not in (None, record.attempt) else changes

        return self.change(run_id, make_changes)

    def change(
        self, run_id: str, make_changes: Callable[[RunRecord], Mapping[str, object]]
    ) -> RunRecord:
        """Change the fields that `make_changes` returns for the record as it is on disk now."""
        with self._lock_record(run_id):
            record = self.load(run_id)
            changes = make_changes(record)
            if changes:
                record = RunRecord.model_validate({**record.model_dump(), **changes})
                self._write(record)
        return record

    def delete_record(self, run_id: str, require: Callable[[RunRecord], None]) -> None:
        """Delete the record of a run, unless `require` raises an error for it as it is now."""
        with self._lock_record(run_id):
            require(self.load(run_id))
            file = self.dir(run_id).record
            with storage_errors(file):
                file.unlink()

    def update_services(
        self, run_id: str, services: Mapping[str, Mapping[str, object]], **changes: object
    ) -> RunRecord:
        """Change fields of services, by their names, and of the record at once."""

        def make_changes(record: RunRecord) -> Mapping[str, object]:
            changed = dict(record.services)
            for name, fields in services.items():
                log = str(self.dir(run_id).get_log_file(name))
                service = changed.get(name) or ServiceRecord(log=log)
                changed[name] = service.model_copy(update=fields)
            return {"services": changed, **changes}

        return self.change(run_id, make_changes)

    def all(self) -> list[RunRecord]:
        """Return every readable run, the newest first."""
        return self.scan()[0]

    def scan(self) -> tuple[list[RunRecord], list[str]]:
        """Return every readable run, the newest first, and the names of those with unreadable
        records.

        Raises:
            StorageError: The folder cannot be read.
        """
        records, unreadable = [], []
        with storage_errors(self.root):
            names = os.listdir(self.root) if self.root.exists() else []
        # Strings, because making and comparing ten thousand paths takes longer than reading them.
        present = {name: os.path.join(self.root, name, RECORD_NAME) for name in names}
        for name, file in present.items():
            try:
                record = _read_record(file)
            except (FileNotFoundError, NotADirectoryError):
                continue
            except (OSError, ValidationError):
                unreadable.append(name)
                continue
            if record.run_id == name:
                records.append(record)
            else:  # The record belongs to another run.
                unreadable.append(name)
        for file in _kept_records.keys() - set(present.values()):
            if file.startswith(f"{self.root}{os.sep}"):
                _kept_records.pop(file, None)
        return sorted(records, key=lambda record: record.created_at, reverse=True), unreadable

    @contextlib.contextmanager
    def _lock_record(self, run_id: str) -> Iterator[None]:
        """Hold the lock of a record within the block."""
        # An unknown run has an error of its own, which says what exists.
        self._require_run(run_id)
        file = self.dir(run_id).path / ".lock"
        timeout_error = StorageError(
            f"another process has locked {file} for {LOCK_S:g} s; it may be stopped or hang"
        )
        with hold_file_lock(file, timeout_s=LOCK_S, timeout_error=timeout_error):
            yield


def read_effective_config(run_dir: RunDir) -> RunConfig:
    """Return the configuration of a run's newest attempt, or the request before the first attempt.

    Raises:
        ConfigError: It cannot be read.
    """
    return RunConfig.from_yaml(run_dir.find_effective_config())
