"""Run `lachesis weights`: export what was trained, and push it to the Hugging Face Hub."""

from __future__ import annotations

import argparse
from pathlib import Path

from lachesis.base.json_text import Json
from lachesis.checkpoints import export_weights, push_to_hub
from lachesis.cli import show_runs
from lachesis.cli.console import print_answer
from lachesis.config.profiles import adopt_profile_keys
from lachesis.config.run_config import RunConfig
from lachesis.operations.service import LachesisService
from lachesis.reporting.model_card import build_model_card
from lachesis.runs.folder import RunDir
from lachesis.runs.record import RunRecord


def handle_weights(args: argparse.Namespace) -> None:
    """Export the weights of a run, and push them if that was asked for.

    Raises:
        CheckpointError: The exported weights differ from those that were trained.
    """
    service = LachesisService()
    record = service.get_run(args.run)
    run_dir = service.store.dir(record.run_id)
    if args.push_to_hub:
        note = _export_and_push(record, run_dir, args)
    else:
        note = _export(record, run_dir, args)
    print_answer(args, note, show_runs.render_export(note))


def _export(record: RunRecord, run_dir: RunDir, args: argparse.Namespace) -> Json:
    backend = RunConfig.from_yaml(run_dir.config).tinker.backend
    adopt_profile_keys(record.profile, backend=backend)
    return export_weights.export(
        record,
        run_dir,
        Path(args.to).expanduser(),
        checkpoint=args.checkpoint,
        merged=args.merged,
        verify=not args.no_verify,
    )


def _export_and_push(record: RunRecord, run_dir: RunDir, args: argparse.Namespace) -> Json:
    """Export and push; what an earlier command has exported to the same folder is only pushed."""
    push_to_hub.check_base_model(record.base_model, merged=args.merged)
    repository = push_to_hub.find_repository(args.push_to_hub)
    target = Path(args.to).expanduser()
    note = export_weights.find_earlier_export(
        record, run_dir, target, checkpoint=args.checkpoint, merged=args.merged
    ) or _export(record, run_dir, args)
    card = build_model_card(record, run_dir, note, repository, merged=args.merged)
    pushed = push_to_hub.push_weights(
        repository, target, note, card, merged=args.merged, public=args.public
    )
    return {**note, "pushed": pushed}
