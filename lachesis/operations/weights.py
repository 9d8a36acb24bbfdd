"""Export, push and serve the weights of a run, for all surfaces."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from lachesis.base.json_text import Json
from lachesis.checkpoints import export_weights, push_to_hub
from lachesis.config.profiles import adopt_profile_keys
from lachesis.operations.runs import get_run, view_run
from lachesis.reporting.model_card import build_model_card
from lachesis.runs.record import RunRecord
from lachesis.runs.store import RunStore, read_effective_config
from lachesis.supervision.serve_model import ModelEndpoint, select_checkpoint, serve_run_model

__all__ = ["ModelEndpoint"]


def export_run(
    store: RunStore,
    run_id: str,
    target: Path,
    *,
    checkpoint: str = "last",
    merged: bool = False,
    verify: bool = True,
) -> Json:
    """Export the weights of a run, and return the note written beside them.

    Raises:
        CheckpointError: The exported weights differ from those that were trained.
    """
    return _export(store, get_run(store, run_id), target, checkpoint, merged=merged, verify=verify)


def _export(
    store: RunStore, record: RunRecord, target: Path, checkpoint: str, *, merged: bool, verify: bool
) -> Json:
    """Export a checkpoint with the keys of the run's profile."""
    run_dir = store.dir(record.run_id)
    backend = read_effective_config(run_dir).tinker.backend
    adopt_profile_keys(record.profile, backend=backend)
    return export_weights.export(
        record, run_dir, target, checkpoint=checkpoint, merged=merged, verify=verify
    )


def export_and_push_run(
    store: RunStore,
    run_id: str,
    target: Path,
    repository: str,
    *,
    checkpoint: str = "last",
    merged: bool = False,
    verify: bool = True,
    public: bool = False,
) -> Json:
    """Export the weights of a run and push them to the Hub; what an earlier call has exported to
    the same folder is only pushed.

    Raises:
        CheckpointError: The exported weights differ from those that were trained.
    """
    record, repository = get_run(store, run_id), push_to_hub.find_repository(repository)
    run_dir = store.dir(record.run_id)
    push_to_hub.check_base_model(record.base_model, merged=merged)
    note = export_weights.find_earlier_export(
        record, run_dir, target, checkpoint=checkpoint, merged=merged
    ) or _export(store, record, target, checkpoint, merged=merged, verify=verify)
    card = build_model_card(view_run(store, record.run_id), note, repository, merged=merged)
    pushed = push_to_hub.push_weights(repository, target, note, card, merged=merged, public=public)
    return {**note, "pushed": pushed}


@contextlib.contextmanager
def serve_run(
    store: RunStore,
    run_id: str,
    checkpoint: str,
    announce: Callable[[str], None],
    *,
    port: int | None = None,
    token: str | None = None,
) -> Iterator[ModelEndpoint]:
    """Serve the weights of a run over an API like OpenAI's as long as the block lasts.

    Args:
        store: The runs of the home.
        run_id: The run.
        checkpoint: `last`, `best`, a step, or `base` for the model before training.
        announce: Told what is being loaded, which takes some seconds.
        port: The port to listen on; by default a free one.
        token: What clients must send; by default a new one.
    """
    record, run_dir = store.load(run_id), store.dir(run_id)
    manifest = select_checkpoint(run_dir, checkpoint)
    backend = read_effective_config(run_dir).tinker.backend
    adopt_profile_keys(record.profile, backend=backend)
    what = f"step {manifest.step}" if manifest else "the base model"
    announce(f"loading {what} of run {run_id} (some seconds)")
    with serve_run_model(record, run_dir, manifest, port=port, token=token) as endpoint:
        yield endpoint
