"""Hand over a run's weights: as a PEFT adapter, and as one model with the base, verified against what was trained."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from lachesis import parity
from lachesis.errors import CheckpointError, RunStateError
from lachesis.files import storage_errors
from lachesis.runs import RunDir, RunRecord, now
from lachesis.trainer.checkpoints import Checkpoints, Manifest

FILES = ("adapter_config.json", "adapter_model.safetensors")


def adapter_folder(folder: RunDir, manifest: Manifest) -> Path | None:
    """Where the embedded engine has put the checkpoint's adapter; None when another server holds it."""
    local = folder.engine / manifest.sampler_weights.removeprefix("tinker://")
    return local if (local / FILES[0]).is_file() else None


def export(record: RunRecord, folder: RunDir, target: Path, *, merged: bool = False, verify: bool = True) -> dict[str, Any]:
    """Write the adapter of the newest whole checkpoint to `target`, which must be new or empty, with a note of where it comes
    from, `merged` also the whole model into its subfolder of that name. With `verify` both are loaded again, and `verified` of
    the note tells whether they say of some texts what the trained model said. `warning` names newer checkpoints that are
    damaged.

    Raises RunStateError when the run has no checkpoint or the target is taken, CheckpointError when the files cannot be had or
    loaded, MissingDependencyError when nothing is installed that loads them.
    """
    checkpoints = Checkpoints(folder.checkpoints)
    manifest = checkpoints.to_resume()
    if manifest is None:
        raise RunStateError(f"run {record.run_id} has no complete checkpoint yet (status {record.status})")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise RunStateError(f"{target} exists already and is not an empty folder; choose another one")
    local = adapter_folder(folder, manifest)
    with storage_errors(target):
        target.mkdir(parents=True, exist_ok=True)
        if local is not None:
            for name in FILES:
                shutil.copyfile(local / name, target / name)
        else:
            _download(manifest, target)
        note = {
            "run_id": record.run_id,
            "environment": record.environment,
            "base_model": record.base_model,
            "step": manifest.step,
            "sampler_weights": manifest.sampler_weights,
            "exported_at": now(),
            "load": recipe(record.base_model, target),
        }
        if verify:
            note |= _verified(record.base_model, target, manifest, merged=merged)
        note["sha256"] = {str(file.relative_to(target)): _sha256(file) for file in sorted(target.rglob("*")) if file.is_file()}
        if warning := checkpoints.passed_over(manifest):
            note["warning"] = warning
        (target / "lachesis.json").write_text(json.dumps(note, indent=2))
    return {**note, "path": str(target.resolve())}


def recipe(base_model: str, target: Path) -> list[str]:
    """Three lines of Python that load the adapter."""
    return [
        "from peft import PeftModel; from transformers import AutoModelForCausalLM, AutoTokenizer",
        f"model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained({base_model!r}), {str(target.resolve())!r})",
        f"tokenizer = AutoTokenizer.from_pretrained({base_model!r})",
    ]


def _verified(base_model: str, target: Path, manifest: Manifest, *, merged: bool) -> dict[str, Any]:
    texts = [(probe.tokens, probe.logprobs) for probe in manifest.probes]
    whole = target / "merged" if merged else None
    adapter, model, revision = parity.check_adapter(base_model, target, texts, whole)
    found: dict[str, Any] = {"base_revision": revision, "parity": adapter.model_dump(), "verified": adapter.verified}
    if model is not None:
        found |= {"parity_merged": model.model_dump(), "verified": adapter.verified and model.verified, "merged": str(whole)}
    return found


def _download(manifest: Manifest, target: Path) -> None:
    """From the server that trained it, by the `tinker` command, with the key in the environment."""
    command = [sys.executable, "-m", "tinker.cli", "checkpoint", "download", manifest.state, "--output", str(target)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    for found in target.rglob(FILES[0]):
        for file in found.parent.iterdir():
            if file.parent != target:
                shutil.move(str(file), target / file.name)
    if done.returncode != 0 or not (target / FILES[0]).is_file():
        raise CheckpointError(f"{manifest.state} could not be downloaded: {done.stderr.strip() or done.stdout.strip()}")


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
