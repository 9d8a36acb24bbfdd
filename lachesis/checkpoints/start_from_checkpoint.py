"""Start a new run from a checkpoint of another run.

It continues with the checkpoint's weights and Adam's moments, at step 0, with any configuration
that fits the adapter.
"""

from dataclasses import dataclass

from lachesis.base.errors import CheckpointError, ConfigError, RunStateError
from lachesis.base.files import copy_private, make_private_folder, storage_errors
from lachesis.checkpoints.manifests import LAST, Checkpoints, Manifest
from lachesis.config.run_config import RunConfig
from lachesis.runs.folder import RunDir
from lachesis.runs.record import RunRecord
from lachesis.runs.store import RunStore, read_effective_config


@dataclass(frozen=True)
class ForkSource:
    """Name the checkpoint that a run starts from."""

    record: RunRecord
    run_dir: RunDir
    manifest: Manifest

    @property
    def name(self) -> str:
        """Return the checkpoint's name, RUN@STEP."""
        return f"{self.record.run_id}@{self.manifest.step}"

    @property
    def config(self) -> RunConfig:
        """Return the configuration of the run that made the checkpoint."""
        return read_effective_config(self.run_dir)

    def require_compatible(self, profile: str, config: RunConfig) -> None:
        """Raise ConfigError if the adapter cannot be trained further with this configuration."""
        source_config = self.config
        for field, theirs, ours in (
            ("profile", self.record.profile, profile),
            ("base model", source_config.openai.model_name, config.openai.model_name),
            ("lora_rank", source_config.tinker.lora_rank, config.tinker.lora_rank),
        ):
            if theirs != ours:
                if field == "profile":
                    hint = "choose that profile"
                else:
                    hint = "leave it out to use that of the checkpoint"
                raise ConfigError(
                    f"checkpoint {self.name} has {field} {theirs} and this run {ours}; they must "
                    f"be equal, so {hint}"
                )

    def copy_into(self, run_dir: RunDir) -> None:
        """Make it the first checkpoint of the run in `run_dir`, which then starts like a resumed
        run.

        Raises:
            StorageError: A file cannot be copied.
        """
        with storage_errors(run_dir.path):
            make_private_folder(run_dir.checkpoints)
            for name in self.manifest.files:
                target = run_dir.path / name
                make_private_folder(target.parent)
                copy_private(self.run_dir.path / name, target)
        copied_fields = self.manifest.model_dump(
            # Not the counts and the results, which belong to the other run.
            include={"state", "sampler_weights", "probes"}
        )
        Checkpoints(run_dir.checkpoints).write(Manifest(step=0, is_forked=True, **copied_fields))


def find_source(store: RunStore, reference: str) -> ForkSource:
    """Return the checkpoint that RUN, RUN@STEP, RUN@best or RUN@last names, with its files
    verified.

    A run alone means its newest checkpoint.

    Raises:
        UnknownRunError: There is no such run.
        RunStateError: There is no such checkpoint.
        CheckpointError: Its files are damaged.
    """
    run_id, _, selector = reference.partition("@")
    record = store.load(run_id)
    run_dir = store.dir(run_id)
    try:
        manifest = Checkpoints(run_dir.checkpoints).select(selector or LAST)
    except (RunStateError, CheckpointError) as error:
        raise type(error)(f"run {run_id} (status {record.status}): {error}") from error
    return ForkSource(record, run_dir, manifest)
