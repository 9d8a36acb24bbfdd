"""Begin a new run from a checkpoint of another one: its weights and Adam's moments, at step 0, with any configuration that fits
the adapter."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from dataclasses import dataclass

from lachesis.base.errors import CheckpointError, ConfigError, RunStateError
from lachesis.base.files import copy_private, make_private_folder, storage_errors
from lachesis.catalog.describe import get_name_or_file
from lachesis.config.run_config import RunConfig
from lachesis.runs.checkpoints import LAST, Checkpoints, Manifest
from lachesis.runs.store import RunDir, RunRecord, RunStore


@dataclass(frozen=True)
class Origin:
    """The checkpoint that a run begins from."""

    record: RunRecord
    folder: RunDir
    manifest: Manifest

    @property
    def name(self) -> str:
        return f"{self.record.run_id}@{self.manifest.step}"

    @property
    def config(self) -> RunConfig:
        """The configuration of the run whose checkpoint this is."""
        return RunConfig.from_yaml(self.folder.config)

    def require_fit(self, profile: str, config: RunConfig) -> None:
        """Raises ConfigError when the adapter cannot go on with this configuration."""
        earlier = self.config
        for what, theirs, ours in (
            ("profile", self.record.profile, profile),
            ("base model", earlier.openai.model_name, config.openai.model_name),
            ("lora_rank", earlier.tinker.lora_rank, config.tinker.lora_rank),
        ):
            if theirs != ours:
                hint = "choose that profile" if what == "profile" else "leave it out: the run's own is taken"
                raise ConfigError(
                    f"checkpoint {self.name} has {what} {theirs}, this run {ours}; they must be the same, so {hint}"
                )

    def plant(self, folder: RunDir) -> None:
        """Make it the first checkpoint of the run in `folder`, which goes on from there as after a resume. Raises
        StorageError."""
        with storage_errors(folder.path):
            make_private_folder(folder.checkpoints)
            for name in self.manifest.files:
                target = folder.path / name
                make_private_folder(target.parent)
                copy_private(self.folder.path / name, target)
        kept = self.manifest.model_dump(include={"state", "sampler_weights", "reference", "probes"})
        Checkpoints(folder.checkpoints).write(Manifest(step=0, borrowed=True, **kept))


def find(store: RunStore, text: str) -> Origin:
    """Return the checkpoint that RUN, RUN@STEP, RUN@best or RUN@last names, with its files verified.

    A run alone means its newest checkpoint. Raises UnknownRunError, RunStateError or CheckpointError.
    """
    run_id, _, which = text.partition("@")
    record = store.load(run_id)
    folder = store.dir(run_id)
    try:
        manifest = Checkpoints(folder.checkpoints).select(which or LAST)
    except (RunStateError, CheckpointError) as error:
        raise type(error)(f"run {run_id} (status {record.status}): {error}") from error
    return Origin(record, folder, manifest)


def advice(record: RunRecord, folder: RunDir, fields: Iterable[str]) -> str:
    """Return what to do for a run with other values of `fields`, as the end of an error message."""
    environment = get_name_or_file(record.environment, record.environment_file)
    edits = [part for name in fields for part in ("--set", f"{name}=VALUE")]
    others = RunConfig.from_yaml(folder.config).env.mixture
    mixed = [part for name, own in others.items() for part in ("--with", f"{name}={own.get('weight', 1)}")]
    profile = [] if record.profile == "embedded" else ["--profile", record.profile]
    newest = Checkpoints(folder.checkpoints).newest()
    begin = ["--from", f"{record.run_id}@{newest.step}"] if newest else ["--model", record.base_model]
    command = shlex.join(["lachesis", "train", environment, *mixed, *profile, *begin, *edits])
    which = f"from its weights of step {newest.step}" if newest else "on the same environment"
    start = f'start_from="{begin[1]}"' if newest else ""
    agents = f"rl_select_environment, rl_edit_config and rl_start_training({start})"
    return f"; a new run {which}, with the other fields at their defaults, takes any field: `{command}`, or {agents}"
