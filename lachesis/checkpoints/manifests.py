"""Manage the checkpoints of a run.

A manifest is written after all files that it names, with a hash of each, so that a checkpoint with
a manifest and unchanged files is complete.
"""

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
from lachesis.base.timestamps import now_iso

log = logging.getLogger(__name__)
MANIFEST_NAME = re.compile(r"step-([0-9]+)\.json")
# Selectors of checkpoints beside their steps.
BEST, LAST = "best", "last"
# The folder of the run in which the embedded engine stores checkpoints.
ENGINE_FOLDER = "engine"


class StoredFile(BaseModel):
    """Identify the content of a file."""

    sha256: str
    size: int


class Probe(BaseModel):
    """Hold token ids and the server's log-probability of each token but the first."""

    tokens: list[int]
    logprobs: list[float]


class HeldOutResult(BaseModel):
    """Hold the result of a checkpoint's weights on items that are never trained on."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    percent_correct: float
    """Share of correct answers, from 0 to 1."""
    items: int | None = None
    """Number of items that were evaluated."""
    step: int
    """Step of the weights that were evaluated."""


class Manifest(BaseModel):
    """Describe one checkpoint.

    `step` training steps have been made; `state` (weights and optimizer) and `sampler_weights` are
    Tinker paths.
    """

    model_config = ConfigDict(use_attribute_docstrings=True)

    step: int
    state: str
    sampler_weights: str
    is_final: bool = False
    is_forked: bool = False
    """Whether it belongs to another run, from which this one was started."""
    groups: int = 0
    """Number of groups that training had received by then, over all attempts."""
    groups_by_environment: dict[str, int] = {}
    """Number of those groups from each environment, if there are several."""
    reward: float | None = None
    """Mean reward of the steps since the previous checkpoint."""
    held_out: HeldOutResult | None = None
    """The newest held-out result of weights after the previous checkpoint, up to this one."""
    probes: list[Probe] = []
    """Texts of the run under the saved weights, to compare with when they are loaded elsewhere."""
    expires_at: str | None = None
    """When the server deletes it, if it has a time to live; renewed while the run goes on."""
    files: dict[str, StoredFile] = {}
    """Files on this machine by their path in the run's folder; empty if another server holds the
    weights.
    """
    created_at: str = ""

    def get_groups_by_environment(self, environments: Iterable[str]) -> dict[str, int]:
        """Return how many groups training had received from each of the run's environments."""
        names = list(environments)
        if len(names) > 1:
            return {name: self.groups_by_environment.get(name, 0) for name in names}
        return {names[0]: self.groups}


def find_best(manifests: Iterable[Manifest]) -> Manifest | None:
    """Return the checkpoint with the best held-out result.

    If no checkpoint was evaluated, the one with the highest mean reward is returned. Of equal ones
    it is the newest. None if there is neither a held-out result nor a reward.
    """
    checkpoints = sorted(manifests, key=lambda manifest: manifest.step, reverse=True)
    for score in (_get_held_out_score, _get_reward):
        scores = [
            (value, manifest) for manifest in checkpoints if math.isfinite(value := score(manifest))
        ]
        if scores:
            return max(scores, key=lambda pair: pair[0])[1]
    return None


def _get_held_out_score(manifest: Manifest) -> float:
    if manifest.held_out:
        return manifest.held_out.percent_correct
    return math.nan


def _get_reward(manifest: Manifest) -> float:
    if manifest.reward is None:
        return math.nan
    return manifest.reward


class Checkpoints:
    """Manage the manifests in one folder, which is inside the run's folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, manifest: Manifest) -> Manifest:
        """Write a manifest with the hashes of its files.

        Raises:
            StorageError: It cannot be written.
        """
        files = {
            # Relative to the run's folder, so that a home can be moved.
            str(file.relative_to(self.folder.parent)): _describe_file(file)
            for file in self._list_local_files(manifest)
        }
        stamped = manifest.model_copy(update={"created_at": now_iso(), "files": files})
        write_private(
            self._get_manifest_path(manifest.step), json.dumps(stamped.model_dump(), indent=2)
        )
        return stamped

    def list_intact(self, *, should_warn: bool = False) -> list[Manifest]:
        """Return the complete checkpoints by step; sizes are compared, hashes are not."""
        manifests = []
        for _, file in self._list_manifest_files():
            try:
                manifest = Manifest.model_validate_json(file.read_bytes())
                self._require_sizes(manifest)
            except (ValidationError, OSError, CheckpointError) as error:
                if should_warn:
                    log.warning(
                        "checkpoint %s is damaged and skipped: %s",
                        file.name,
                        _get_first_line(error),
                    )
                continue
            manifests.append(manifest)
        return manifests

    def find_newest(self) -> Manifest | None:
        """Return the newest complete checkpoint, or None."""
        return next(reversed(self.list_intact()), None)

    def describe_start(self) -> str:
        """Say where another attempt begins."""
        if manifest := self.find_newest():
            return f"from its checkpoint of step {manifest.step}"
        return "from the beginning, because it has no checkpoint"

    def find_resumable(self) -> Manifest | None:
        """Return the newest checkpoint whose files have the right hashes, or None if none was
        written.

        Damaged checkpoints are skipped with a warning.

        Raises:
            CheckpointError: All checkpoints are damaged.
        """
        for manifest in reversed(self.list_intact(should_warn=True)):
            changed_files = self.find_changed_files(manifest)
            if not changed_files:
                return manifest
            log.warning(
                "checkpoint of step %d is damaged and skipped: %s has changed",
                manifest.step,
                ", ".join(changed_files),
            )
        manifest_names = [file.name for _, file in self._list_manifest_files()]
        if manifest_names:
            raise CheckpointError(
                f"no checkpoint in {self.folder} is complete ({', '.join(manifest_names[-5:])}); "
                "the log above says what is wrong with each. Restore its files from a copy; or "
                "start a new run, for example from a checkpoint of another one; or remove these "
                "manifests, and the run starts again at step 0"
            )
        return None

    def describe_skipped(self, manifest: Manifest) -> str | None:
        """Say which newer checkpoints were skipped because they are damaged, or return None."""
        skipped_names = [
            file.stem for step, file in self._list_manifest_files() if step > manifest.step
        ]
        if skipped_names:
            return f"damaged and skipped: {', '.join(skipped_names)}; this is step {manifest.step}"
        return None

    def set_aside(self, after: int) -> None:
        """Rename the manifests of later steps, so that they no longer count.

        They are damaged, or training would not continue from here. As the newest checkpoints they
        would cause those saved from now on to be deleted. Their files are kept.
        """
        for step, file in self._list_manifest_files():
            if step > after:
                log.warning("%s is set aside: training continues from step %d", file.name, after)
                with storage_errors(file):
                    file.rename(file.with_suffix(".damaged"))

    def has_manifest(self, step: str) -> bool:
        """Return whether a checkpoint of this step was written and not superseded."""
        return step.isdecimal() and self._get_manifest_path(int(step)).is_file()

    def find_changed_files(self, manifest: Manifest) -> list[str]:
        """Return the checkpoint's files whose hashes differ from those in the manifest."""
        return [
            name
            for name, stored in manifest.files.items()
            if _describe_file(self.folder.parent / name) != stored
        ]

    def select(self, selector: str) -> Manifest:
        """Return a checkpoint whose files have the right hashes.

        Args:
            selector: "last" for the newest undamaged one, "best" for the one that `find_best`
                returns, or a step.

        Raises:
            RunStateError: There is no such checkpoint.
            CheckpointError: Its files are damaged.
        """
        if selector == LAST:
            if newest := self.find_resumable():
                return newest
            raise RunStateError("there is no checkpoint yet")
        intact = self.list_intact()
        steps = ", ".join(str(manifest.step) for manifest in intact) or "none yet"
        manifest = find_best(intact)
        if selector != BEST:
            manifest = self._select_step(selector, intact, steps)
        elif manifest is None:
            raise RunStateError(
                f"no checkpoint has a held-out result or a reward to choose by; allowed: {LAST}, "
                f"{steps}"
            )
        self._require_unchanged(manifest, steps)
        return manifest

    def _require_unchanged(self, manifest: Manifest, steps: str) -> None:
        if changed_files := self.find_changed_files(manifest):
            raise CheckpointError(
                f"checkpoint {manifest.step} is damaged: {', '.join(changed_files)} has changed "
                f"since it was written; complete ones may be among: {LAST}, {steps}"
            )

    def _select_step(self, selector: str, intact: list[Manifest], steps: str) -> Manifest:
        """Return the intact checkpoint of a step; damaged and unknown ones raise other errors."""
        for manifest in intact:
            if str(manifest.step) == selector:
                return manifest
        if self.has_manifest(selector):
            self.list_intact(should_warn=True)
            raise CheckpointError(
                f"checkpoint {selector} is damaged; the log above says what is wrong with it"
            )
        raise RunStateError(
            f"there is no complete checkpoint {shorten(repr(selector), 40)}; allowed: {BEST}, "
            f"{LAST}, {steps}"
        )

    def note_held_out(self, step: int, held_out: HeldOutResult) -> None:
        """Add a held-out result to the manifest of a checkpoint, if there is one of this step.

        Raises:
            StorageError: The manifest cannot be written.
        """
        for manifest in self.list_intact():
            if manifest.step == step and (
                manifest.held_out is None or manifest.held_out.step <= held_out.step
            ):
                self._replace(manifest, held_out=held_out)

    def _replace(self, manifest: Manifest, **changes: object) -> None:
        updated = manifest.model_copy(update=changes)
        file = self._get_manifest_path(manifest.step)
        write_private(file, json.dumps(updated.model_dump(), indent=2))

    def note_expiry(self, step: int, expires_at: str | None) -> None:
        """Record when the server deletes the checkpoint of a step.

        Raises:
            StorageError: The manifest cannot be written.
        """
        for manifest in self.list_intact():
            if manifest.step == step and manifest.expires_at != expires_at:
                self._replace(manifest, expires_at=expires_at)

    def find_superseded(
        self, num_to_keep: int, *, spared_step: int | None = None
    ) -> list[Manifest]:
        """Return the checkpoints that are no longer needed.

        These are all except the last `num_to_keep`, the best one, a final one, those of other runs,
        and the one of step `spared_step`, which is being evaluated.
        """
        manifests = self.list_intact()
        needed = (
            find_best(manifests),
            *(
                candidate
                for candidate in manifests
                if candidate.is_final or candidate.is_forked or candidate.step == spared_step
            ),
        )
        return [
            manifest for manifest in manifests[: -max(1, num_to_keep)] if manifest not in needed
        ]

    def remove_manifest(self, manifest: Manifest) -> None:
        """Remove a manifest, before its files, so that no incomplete checkpoint counts."""
        self._get_manifest_path(manifest.step).unlink(missing_ok=True)

    def _list_manifest_files(self) -> list[tuple[int, Path]]:
        """Return all manifests with their steps, in order of steps.

        Their names have another order from step 1000000 on.
        """
        matches = (
            (MANIFEST_NAME.fullmatch(file.name), file) for file in self.folder.glob("step-*.json")
        )
        return sorted((int(match[1]), file) for match, file in matches if match)

    def _get_manifest_path(self, step: int) -> Path:
        return self.folder / f"step-{step:06d}.json"

    def _list_local_files(self, manifest: Manifest) -> list[Path]:
        files: list[Path] = []
        for tinker_path in (manifest.state, manifest.sampler_weights):
            folder = self.folder.parent / ENGINE_FOLDER / tinker_path.removeprefix("tinker://")
            files += [file for file in sorted(folder.glob("*")) if file.is_file()]
        return files

    def _require_sizes(self, manifest: Manifest) -> None:
        for name, stored in manifest.files.items():
            size = (self.folder.parent / name).stat().st_size
            if size != stored.size:
                raise CheckpointError(f"{name} has {size} bytes instead of {stored.size}")


def _describe_file(file: Path) -> StoredFile | None:
    try:
        with file.open("rb") as stream:
            return StoredFile(
                sha256=hashlib.file_digest(stream, "sha256").hexdigest(), size=file.stat().st_size
            )
    except OSError:
        return None


def _get_first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
