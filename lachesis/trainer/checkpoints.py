"""Which checkpoints of a run are whole: a manifest is written after everything that it names, with a hash of each file."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from lachesis.errors import CheckpointError
from lachesis.files import storage_errors, write_private
from lachesis.runs import now

log = logging.getLogger(__name__)
ENGINE = "engine"
"""The folder of the run in which the embedded engine keeps what it saves."""


class StoredFile(BaseModel):
    sha256: str
    size: int


class Reference(BaseModel):
    """A text and its mean negative log-probability under the saved weights, in nats per token."""

    tokens: list[int]
    loss: float


class Probe(BaseModel):
    """A text and what the server that made the checkpoint says of it: the log-probability of each token but the first."""

    tokens: list[int]
    logprobs: list[float]


class Manifest(BaseModel):
    """One checkpoint. `step` training steps have been made; `state` (weights and optimizer) and `sampler_weights` are Tinker
    paths."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    step: int
    state: str
    sampler_weights: str
    final: bool = False
    borrowed: bool = False
    """Whether it is that of another run, from which this one has begun."""
    groups: int = 0
    """Groups that training had received until then, over all attempts."""
    mixture: dict[str, int] = {}
    """How many of them each environment gave, where there are several."""
    reward: float | None = None
    """Mean reward of the steps since the checkpoint before it."""
    reference: Reference | None = None
    probes: list[Probe] = []
    """Texts of the run under the saved weights; whoever loads them elsewhere can compare."""
    files: dict[str, StoredFile] = {}
    """What lies on this machine, by its path in the run's folder; nothing when another server holds the weights."""
    created_at: str = ""

    def received(self, environments: Iterable[str]) -> dict[str, int]:
        """Groups that training had received of each of the run's environments, the first one of which may be the only one."""
        names = list(environments)
        return {name: self.mixture.get(name, 0) for name in names} if len(names) > 1 else {names[0]: self.groups}


class Checkpoints:
    """The manifests in one folder, which lies in the run's own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, manifest: Manifest) -> Manifest:
        """With the hashes of its files. Raises StorageError."""
        files = {str(file.relative_to(self.folder.parent)): _stored(file) for file in self._local_files(manifest)}
        stamped = manifest.model_copy(update={"created_at": now(), "files": files})
        write_private(self._file(manifest.step), json.dumps(stamped.model_dump(), indent=2))
        return stamped

    def all(self, *, warn: bool = False) -> list[Manifest]:
        """The whole ones, in order of steps; sizes are compared, hashes are not. The others are passed over."""
        found = []
        for file in sorted(self.folder.glob("step-*.json")):
            try:
                manifest = Manifest.model_validate_json(file.read_bytes())
                self._require_sizes(manifest)
            except (ValidationError, OSError, CheckpointError) as error:
                if warn:
                    log.warning("checkpoint %s is damaged and passed over: %s", file.name, _first_line(error))
                continue
            found.append(manifest)
        return found

    def newest(self) -> Manifest | None:
        """The newest whole one; None when there is none."""
        return next(reversed(self.all()), None)

    def to_resume(self) -> Manifest | None:
        """The newest one whose files are what was written, hash by hash; None when none was ever written. Damaged ones are
        passed over with a warning. Raises CheckpointError when there are only such."""
        for manifest in reversed(self.all(warn=True)):
            wrong = self.changed(manifest)
            if not wrong:
                return manifest
            log.warning("checkpoint of step %d is damaged and passed over: %s has changed", manifest.step, ", ".join(wrong))
        written = sorted(file.name for file in self.folder.glob("step-*.json"))
        if written:
            raise CheckpointError(
                f"none of the checkpoints in {self.folder} is whole ({', '.join(written[-5:])}); the log above says what is "
                "wrong with each. Put its files back from a copy; or begin a new run, also from a checkpoint of another one; "
                "or remove these manifests, and the run begins at step 0"
            )
        return None

    def passed_over(self, manifest: Manifest) -> str | None:
        """That it is not the newest one, as those after it are damaged."""
        later = [file.stem for file in sorted(self.folder.glob("step-*.json")) if file.stem > self._file(manifest.step).stem]
        return f"damaged, and passed over: {', '.join(later)}; this is step {manifest.step}" if later else None

    def set_aside(self, after: int) -> None:
        """Those of later steps are damaged, or training would not go on from here. They keep their files, under a name that
        counts no more: as the newest ones they would have what is saved from now on deleted."""
        for file in self.folder.glob("step-*.json"):
            if file.stem > self._file(after).stem:
                log.warning("%s is set aside, as training goes on from step %d", file.name, after)
                with storage_errors(file):
                    file.rename(file.with_suffix(".damaged"))

    def has(self, step: str) -> bool:
        """Whether one of this step was ever written and not superseded, whole or not."""
        return step.isdecimal() and self._file(int(step)).is_file()

    def changed(self, manifest: Manifest) -> list[str]:
        """Its files that are not what was written, hash by hash."""
        return [name for name, stored in manifest.files.items() if _stored(self.folder.parent / name) != stored]

    def superseded(self, keep: int) -> list[Manifest]:
        """Those that nobody needs any more: all but the last `keep`, the one with the highest reward, a final one, and one that
        belongs to another run."""
        known = self.all()
        best = max((one for one in known if one.reward is not None), key=lambda one: one.reward or 0.0, default=None)
        return [one for one in known[: -max(1, keep)] if not one.final and not one.borrowed and one is not best]

    def remove(self, manifest: Manifest) -> None:
        """The manifest first, so that nothing is called whole whose files are being deleted."""
        self._file(manifest.step).unlink(missing_ok=True)

    def _file(self, step: int) -> Path:
        return self.folder / f"step-{step:06d}.json"

    def _local_files(self, manifest: Manifest) -> list[Path]:
        found: list[Path] = []
        for path in (manifest.state, manifest.sampler_weights):
            folder = self.folder.parent / ENGINE / path.removeprefix("tinker://")
            found += [file for file in sorted(folder.glob("*")) if file.is_file()]
        return found

    def _require_sizes(self, manifest: Manifest) -> None:
        for name, stored in manifest.files.items():
            size = (self.folder.parent / name).stat().st_size
            if size != stored.size:
                raise CheckpointError(f"{name} has {size} bytes instead of {stored.size}")


def _stored(file: Path) -> StoredFile | None:
    try:
        with file.open("rb") as stream:
            return StoredFile(sha256=hashlib.file_digest(stream, "sha256").hexdigest(), size=file.stat().st_size)
    except OSError:
        return None


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
