"""Which checkpoints of a run are complete: a manifest is written after everything it names."""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import BaseModel, ValidationError

from lachesis.errors import CheckpointError
from lachesis.runs import now, write_private


class Manifest(BaseModel):
    """One complete checkpoint. `step` training steps have been made; `state` and `sampler_weights` are Tinker paths."""

    step: int
    state: str
    sampler_weights: str
    final: bool = False
    created_at: str = ""


class Checkpoints:
    """The manifests in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, manifest: Manifest) -> Path:
        """Raises StorageError."""
        file = self.folder / f"step-{manifest.step:06d}.json"
        stamped = manifest.model_copy(update={"created_at": now()})
        write_private(file, json.dumps(stamped.model_dump(), indent=2))
        return file

    def all(self) -> list[Manifest]:
        """In order of steps. Raises CheckpointError for a manifest that cannot be read."""
        manifests = []
        for file in sorted(self.folder.glob("step-*.json")):
            try:
                manifests.append(Manifest.model_validate_json(file.read_bytes()))
            except (ValidationError, OSError) as error:
                raise CheckpointError(f"{file} is no checkpoint manifest; remove it to use an older one: {error}") from error
        return manifests

    def newest(self) -> Manifest | None:
        manifests = self.all()
        return manifests[-1] if manifests else None
