"""Begin a new run from a checkpoint of another one: its weights and Adam's moments, at step 0, with any configuration that fits
the adapter."""

from __future__ import annotations

import shutil
from dataclasses import dataclass

from lachesis.config import RunConfig
from lachesis.errors import CheckpointError, ConfigError, RunStateError
from lachesis.files import private, storage_errors
from lachesis.runs import RunDir, RunRecord, RunStore
from lachesis.trainer.checkpoints import Checkpoints, Manifest


@dataclass(frozen=True)
class Origin:
    """The checkpoint that a run begins from."""

    record: RunRecord
    folder: RunDir
    manifest: Manifest

    @property
    def name(self) -> str:
        return f"{self.record.run_id}@{self.manifest.step}"

    def require_fit(self, profile: str, config: RunConfig) -> None:
        """Raises ConfigError when the adapter cannot go on with this configuration."""
        of_origin = RunConfig.from_yaml(self.folder.config)
        for what, theirs, ours in (
            ("profile", self.record.profile, profile),
            ("base model", of_origin.openai.model_name, config.openai.model_name),
            ("lora_rank", of_origin.tinker.lora_rank, config.tinker.lora_rank),
        ):
            if theirs != ours:
                raise ConfigError(f"checkpoint {self.name} has {what} {theirs}, this run {ours}; they must be the same")

    def plant(self, folder: RunDir) -> None:
        """Make it the first checkpoint of the run in `folder`, which goes on from there as after a resume. Raises
        StorageError."""
        with storage_errors(folder.path), private():
            folder.checkpoints.mkdir(parents=True, exist_ok=True)
            for name in self.manifest.files:
                target = folder.path / name
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(self.folder.path / name, target)
        kept = self.manifest.model_dump(include={"state", "sampler_weights", "reference", "probes"})
        Checkpoints(folder.checkpoints).write(Manifest(step=0, borrowed=True, **kept))


def find(store: RunStore, text: str) -> Origin:
    """The checkpoint that RUN or RUN@STEP names, its files verified; of a run alone the newest. Raises UnknownRunError,
    RunStateError or CheckpointError."""
    run_id, _, step = text.partition("@")
    record = store.load(run_id)
    folder = store.dir(run_id)
    checkpoints = Checkpoints(folder.checkpoints)
    if not step:
        manifest = checkpoints.to_resume()
        if manifest is None:
            raise RunStateError(f"run {run_id} has no checkpoint yet (status {record.status})")
        return Origin(record, folder, manifest)
    for manifest in checkpoints.all():
        if str(manifest.step) == step:
            if damaged := checkpoints.changed(manifest):
                raise CheckpointError(f"checkpoint {text} is damaged: {', '.join(damaged)} has changed since it was written")
            return Origin(record, folder, manifest)
    if checkpoints.has(step):
        checkpoints.all(warn=True)
        raise CheckpointError(f"checkpoint {text} is damaged; the log above says what is wrong with it")
    known = ", ".join(str(one.step) for one in checkpoints.all()) or "none"
    raise RunStateError(f"run {run_id} has no whole checkpoint of step {step!r}; allowed: {known}")
