"""Export a run's weights as a PEFT adapter, and merged with the base model, and verify them."""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from lachesis.base.errors import RunStateError
from lachesis.base.files import create_folder_atomically, storage_errors
from lachesis.base.json_text import Json
from lachesis.base.timestamps import now_iso
from lachesis.checkpoints.download_weights import download_checkpoint
from lachesis.checkpoints.manifests import LAST, Checkpoints, Manifest, find_best
from lachesis.runs.folder import RunDir
from lachesis.runs.record import RunRecord
from lachesis.weight_agreement.at_export import MERGED_FOLDER, TENSORS_FILE, verify_weights

# What is known about exported weights, beside them.
NOTE_FILE = "lachesis.json"
ADAPTER_FILES = ("adapter_config.json", TENSORS_FILE)


def find_adapter_folder(run_dir: RunDir, manifest: Manifest) -> Path | None:
    """Return the folder of the adapter if the embedded engine holds it, or None."""
    adapter = run_dir.engine / manifest.sampler_weights.removeprefix("tinker://")
    if (adapter / ADAPTER_FILES[0]).is_file():
        return adapter
    return None


class BetterCheckpoint(BaseModel):
    """Describe a checkpoint that is better than the newest checkpoint."""

    model_config = ConfigDict(use_attribute_docstrings=True, protected_namespaces=())

    step: int
    sampler_weights: str
    """Tinker path for sampling."""
    state: str
    """Tinker path for further training, including the optimizer state."""
    adapter: str | None
    """A PEFT folder on this machine; null when another server holds the weights."""
    reason: str
    """Why it is better."""


class WeightLocations(BaseModel):
    """Say where the weights of the newest complete checkpoint are; empty if there is none."""

    model_config = ConfigDict(use_attribute_docstrings=True, protected_namespaces=())

    step: int | None = None
    sampler_weights: str | None = None
    """Tinker path for sampling."""
    state: str | None = None
    """Tinker path for further training, including the optimizer state."""
    adapter: str | None = None
    """A PEFT folder on this machine; null when another server holds the weights."""
    expires_at: str | None = None
    """When the server deletes them, if they have a time to live; null if they are kept."""
    best: BetterCheckpoint | None = None
    """An older checkpoint that is better than the newest one, by held-out result or else by mean
    reward.
    """
    warning: str | None = None


def find_weights(run_dir: RunDir) -> WeightLocations:
    """Return the place of the weights of a run's newest checkpoint, and of a better checkpoint."""
    checkpoints = Checkpoints(run_dir.checkpoints)
    newest = checkpoints.find_newest()
    if newest is None:
        return WeightLocations()
    if better := _find_better_checkpoint(run_dir, newest):
        best_field = {"best": better}
    else:
        best_field = {}
    return WeightLocations(
        step=newest.step,
        sampler_weights=newest.sampler_weights,
        state=newest.state,
        warning=checkpoints.describe_skipped(newest),
        adapter=_to_text(find_adapter_folder(run_dir, newest)),
        expires_at=newest.expires_at,
        **best_field,
    )


def _find_better_checkpoint(run_dir: RunDir, manifest: Manifest) -> BetterCheckpoint | None:
    """Return the best checkpoint of the run unless this is it, with the reason why it is better."""
    other = find_best(Checkpoints(run_dir.checkpoints).list_intact())
    if other is None or other.step == manifest.step:
        return None
    return BetterCheckpoint(
        step=other.step,
        sampler_weights=other.sampler_weights,
        state=other.state,
        adapter=_to_text(find_adapter_folder(run_dir, other)),
        reason=f"{_describe_score(other)} instead of "
        f"{_describe_score(manifest, compared_with=other)}",
    )


def _describe_score(manifest: Manifest, compared_with: Manifest | None = None) -> str:
    """Describe the result by which a checkpoint is judged."""
    if (compared_with or manifest).held_out is None:
        if manifest.reward is None:
            return "no reward"
        return f"mean reward {manifest.reward:.3f}"
    result = manifest.held_out
    if result:
        return f"held-out accuracy {result.percent_correct:.3f} on {result.items} items"
    return "no held-out result"


def _to_text(path: Path | None) -> str | None:
    if path:
        return str(path)
    return None


def export(
    record: RunRecord,
    run_dir: RunDir,
    target: Path,
    *,
    checkpoint: str = LAST,
    merged: bool = False,
    verify: bool = True,
) -> dict[str, Any]:
    """Write the adapter of a checkpoint to `target`, and return a note of its origin.

    The note is written to the folder too.

    Args:
        record: The run.
        run_dir: Its folder.
        target: A new or empty folder. It is filled completely or not at all.
        checkpoint: "last" for the newest complete checkpoint, "best" for the one with the best
            held-out result, or else the highest mean reward, or a step.
        merged: Also write the merged model into the subfolder of that name.
        verify: Load the written weights, and compare their log-probabilities of some texts with
            those of the trained model.

    Raises:
        RunStateError: There is no such checkpoint, or the target is not empty.
        CheckpointError: The files cannot be fetched or loaded, or are not the trained weights.
        MissingDependencyError: A package for loading them is not installed.
    """
    try:
        manifest = Checkpoints(run_dir.checkpoints).select(checkpoint)
    except RunStateError as error:
        raise RunStateError(f"run {record.run_id} (status {record.status}): {error}") from error
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise RunStateError(
            f"{target} already exists and is not an empty folder; choose another one"
        )
    with create_folder_atomically(target) as staging_folder:
        note = _write_files(
            record, run_dir, manifest, staging_folder, target, merged=merged, verify=verify
        )
        note |= _compare_with_others(run_dir, manifest, is_last=checkpoint == LAST)
        with storage_errors(target):
            (staging_folder / NOTE_FILE).write_text(json.dumps(note, indent=2))
    return {**note, "path": str(target.resolve())}


def find_earlier_export(
    record: RunRecord, run_dir: RunDir, target: Path, *, checkpoint: str = LAST, merged: bool
) -> Json | None:
    """Return the note of a folder that holds this export already, or None if it holds none.

    The arguments are those of `export`. Files that were changed since do not count.
    """
    try:
        note: Json = json.loads((target / NOTE_FILE).read_text())
        step = Checkpoints(run_dir.checkpoints).select(checkpoint).step
        if (note["run_id"], note["step"]) != (record.run_id, step):
            return None
        if merged and not (target / MERGED_FOLDER).is_dir():
            return None
        if any(_hash_file(target / name) != sha256 for name, sha256 in note["sha256"].items()):
            return None
    except (OSError, ValueError, KeyError, AttributeError, RunStateError):
        return None
    return {**note, "path": str(target.resolve())}


def _compare_with_others(run_dir: RunDir, manifest: Manifest, *, is_last: bool) -> dict[str, Any]:
    """Return the note about checkpoints that are newer or better than the exported checkpoint."""
    note: dict[str, Any] = {}
    if is_last and (warning := Checkpoints(run_dir.checkpoints).describe_skipped(manifest)):
        note["warning"] = warning
    if better := _find_better_checkpoint(run_dir, manifest):
        note["better"] = {"step": better.step, "reason": better.reason}
    return note


def _write_files(
    record: RunRecord,
    run_dir: RunDir,
    manifest: Manifest,
    staging_folder: Path,
    target: Path,
    *,
    merged: bool,
    verify: bool,
) -> dict[str, Any]:
    """Write the files of a checkpoint to a temporary folder; return their note."""
    adapter = find_adapter_folder(run_dir, manifest)
    num_breaks = 0
    if adapter is None:
        cache = run_dir.downloads / f"step-{manifest.step:06d}"
        num_breaks = download_checkpoint(manifest.state, cache, staging_folder)
    else:
        with storage_errors(target):
            for name in ADAPTER_FILES:
                shutil.copyfile(adapter / name, staging_folder / name)
    note = {
        "run_id": record.run_id,
        "environment": record.environment,
        "base_model": record.base_model,
        "step": manifest.step,
        "sampler_weights": manifest.sampler_weights,
        "reward": manifest.reward,
        "held_out": manifest.held_out.model_dump() if manifest.held_out else None,
        "exported_at": now_iso(),
        "load": build_loading_code(record.base_model, target),
    }
    if num_breaks:
        note["download_continued"] = num_breaks
    if verify:
        note |= verify_weights(record, run_dir, staging_folder, manifest, merged=merged)
        if merged:
            note["merged"] = str(target / MERGED_FOLDER)
    files = sorted(file for file in staging_folder.rglob("*") if file.is_file())
    note["sha256"] = {str(file.relative_to(staging_folder)): _hash_file(file) for file in files}
    return note


def build_loading_code(base_model: str, target: Path) -> list[str]:
    """Return lines of Python that load the adapter."""
    return [
        "from peft import PeftModel",
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        f"base_model = AutoModelForCausalLM.from_pretrained({base_model!r})",
        f"model = PeftModel.from_pretrained(base_model, {str(target.resolve())!r})",
        f"tokenizer = AutoTokenizer.from_pretrained({base_model!r})",
    ]


def _hash_file(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
