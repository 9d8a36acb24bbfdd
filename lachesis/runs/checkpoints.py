"""Which checkpoints of a run are whole: a manifest is written after everything that it names, with a hash of each file."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import re
from collections.abc import Iterable
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from lachesis.base.errors import CheckpointError, RunStateError, shorten
from lachesis.base.files import storage_errors, write_private
from lachesis.runs.store import now

log = logging.getLogger(__name__)
MANIFEST = re.compile(r"step-([0-9]+)\.json")
BEST, LAST = "best", "last"
"""Names of checkpoints beside their steps."""
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


class HeldOut(BaseModel):
    """What the weights of a checkpoint achieved on items that training never sees."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    percent_correct: float
    """Share of correct answers, from 0 to 1."""
    items: int | None = None
    """Number of items that were evaluated."""
    step: int
    """Step of the weights that were evaluated."""


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
    held_out: HeldOut | None = None
    """The newest held-out result of its weights, or of weights between the checkpoint before it and this one."""
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


def best(manifests: Iterable[Manifest]) -> Manifest | None:
    """Return the checkpoint with the best held-out result.

    If no checkpoint was evaluated, the one with the highest mean reward is returned. Of equal ones the newest counts. None
    if there is neither a held-out result nor a reward.
    """
    checkpoints = sorted(manifests, key=lambda manifest: manifest.step, reverse=True)
    for score in (_held_out_score, _reward):
        scores = [(value, manifest) for manifest in checkpoints if math.isfinite(value := score(manifest))]
        if scores:
            return max(scores, key=lambda pair: pair[0])[1]
    return None


def _held_out_score(manifest: Manifest) -> float:
    return manifest.held_out.percent_correct if manifest.held_out else math.nan


def _reward(manifest: Manifest) -> float:
    return math.nan if manifest.reward is None else manifest.reward


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
        for _, file in self._written():
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
        written = [file.name for _, file in self._written()]
        if written:
            raise CheckpointError(
                f"none of the checkpoints in {self.folder} is whole ({', '.join(written[-5:])}); the log above says what is "
                "wrong with each. Put its files back from a copy; or begin a new run, also from a checkpoint of another one; "
                "or remove these manifests, and the run begins at step 0"
            )
        return None

    def passed_over(self, manifest: Manifest) -> str | None:
        """That it is not the newest one, as those after it are damaged."""
        later = [file.stem for step, file in self._written() if step > manifest.step]
        return f"damaged, and passed over: {', '.join(later)}; this is step {manifest.step}" if later else None

    def set_aside(self, after: int) -> None:
        """Those of later steps are damaged, or training would not go on from here. They keep their files, under a name that
        counts no more: as the newest ones they would have what is saved from now on deleted."""
        for step, file in self._written():
            if step > after:
                log.warning("%s is set aside, as training goes on from step %d", file.name, after)
                with storage_errors(file):
                    file.rename(file.with_suffix(".damaged"))

    def has(self, step: str) -> bool:
        """Whether one of this step was ever written and not superseded, whole or not."""
        return step.isdecimal() and self._file(int(step)).is_file()

    def changed(self, manifest: Manifest) -> list[str]:
        """Its files that are not what was written, hash by hash."""
        return [name for name, stored in manifest.files.items() if _stored(self.folder.parent / name) != stored]

    def select(self, which: str) -> Manifest:
        """Return a checkpoint whose files are what was written, hash by hash.

        Args:
            which: "last" for the newest one that is not damaged, "best" for the one that `best` returns, or a step.

        Raises:
            RunStateError: If there is no such checkpoint.
            CheckpointError: If its files are damaged.
        """
        if which == LAST:
            newest = self.to_resume()
            if newest is None:
                raise RunStateError("there is no checkpoint yet")
            return newest
        whole = self.all()
        steps = ", ".join(str(manifest.step) for manifest in whole) or "none yet"
        if which == BEST:
            manifest = best(whole)
            if manifest is None:
                raise RunStateError(f"no checkpoint has a held-out result or a reward to choose by; allowed: {LAST}, {steps}")
        else:
            manifest = next((one for one in whole if str(one.step) == which), None)
        if manifest is None:
            if self.has(which):
                self.all(warn=True)
                raise CheckpointError(f"checkpoint {which} is damaged; the log above says what is wrong with it")
            raise RunStateError(f"there is no whole checkpoint {shorten(repr(which), 40)}; allowed: {BEST}, {LAST}, {steps}")
        if damaged := self.changed(manifest):
            raise CheckpointError(
                f"checkpoint {manifest.step} is damaged: {', '.join(damaged)} has changed since it was written; whole ones may "
                f"be among: {LAST}, {steps}"
            )
        return manifest

    def note_held_out(self, step: int, held_out: HeldOut) -> None:
        """Add a held-out result to the manifest of a checkpoint, if there is one of this step. Raises StorageError."""
        for manifest in self.all():
            if manifest.step == step and (manifest.held_out is None or manifest.held_out.step <= held_out.step):
                changed = manifest.model_copy(update={"held_out": held_out})
                write_private(self._file(step), json.dumps(changed.model_dump(), indent=2))

    def superseded(self, keep: int, *, spare: int | None = None) -> list[Manifest]:
        """Return the checkpoints that nobody needs any more.

        These are all but the last `keep`, the best one, a final one, one that belongs to another run, and the one of step
        `spare`, whose evaluation is under way.
        """
        manifests = self.all()
        needed = (best(manifests), *(one for one in manifests if one.final or one.borrowed or one.step == spare))
        return [manifest for manifest in manifests[: -max(1, keep)] if manifest not in needed]

    def remove(self, manifest: Manifest) -> None:
        """The manifest first, so that nothing is called whole whose files are being deleted."""
        self._file(manifest.step).unlink(missing_ok=True)

    def _written(self) -> list[tuple[int, Path]]:
        """Return the manifests, whole or not, with their steps, in the order of steps.

        The order of names is another one from step 1000000 on.
        """
        matches = ((MANIFEST.fullmatch(file.name), file) for file in self.folder.glob("step-*.json"))
        return sorted((int(match[1]), file) for match, file in matches if match)

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
