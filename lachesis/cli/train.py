"""Run `lachesis train` and `lachesis resume`: check a launch, start the run, and watch it."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace

from lachesis.checkpoints.manifests import Checkpoints
from lachesis.cli import console, show_runs, watch
from lachesis.cli.background_server import check_with_server
from lachesis.cli.console import print_answer
from lachesis.cli.launch_options import read_launch_request
from lachesis.cli.preview import show_preview
from lachesis.config.field_edits import parse_assignment
from lachesis.launch.choose_model import describe_default_model
from lachesis.launch.resolved_launch import ResolvedLaunch, make_run_record
from lachesis.operations.service import LachesisService
from lachesis.prefect_client import submit
from lachesis.runs.record import RunRecord
from lachesis.spending.confirmation import describe_cost, needs_confirmation


def handle_train(args: argparse.Namespace) -> int:
    """Check a launch, start the run, and watch it if that was asked for."""
    service = LachesisService()
    launch = read_launch_request(args, service)
    if args.dry_run:
        show_preview(args, service, launch)
        return 0
    resolved = check_with_server(args, service, lambda: service.check(launch))
    show_warnings(resolved)
    prepare_model(args, service, resolved)
    confirmed = confirm_cost(args, service, resolved)
    if confirmed is None:
        print_answer(args, {"started": False}, "nothing was started")
        return 1
    return _follow_run(args, service, service.start(confirmed))


def confirm_cost(
    args: argparse.Namespace, service: LachesisService, launch: ResolvedLaunch
) -> ResolvedLaunch | None:
    """Return the launch with its user's yes to what it costs, or None if the user says no.

    A free launch, and one whose money is limited, is returned as it is. Where nobody can answer, an
    unconfirmed one is refused when it is started.
    """
    request = launch.request
    if not needs_confirmation(request.profile, launch.set_fields):
        return launch
    forecast = make_run_record(launch, "RUN_ID", service.tests).forecast
    if not args.yes:
        # Nobody can answer, so the start itself refuses, with the forecast.
        if args.json or not sys.stdin.isatty():
            return launch
        console.print_note(f"{launch.environment.name} on profile {request.profile}:")
        for sentence in describe_cost(forecast).split("; "):
            console.print_note(f"  {sentence}")
        if input("Start this run? [y/N] ").strip().lower() not in ("y", "yes"):
            return None
    return replace(launch, request=replace(request, confirmed=True))


def show_warnings(launch: ResolvedLaunch) -> None:
    """Print what the owner should know about a launch."""
    for warning in launch.warnings:
        console.print_note(f"note: {warning}")


def prepare_model(
    args: argparse.Namespace, service: LachesisService, launch: ResolvedLaunch
) -> None:
    """Build the tiny model if the launch needs it, and show the progress."""
    config = launch.config
    if model_note := describe_default_model(launch.request, config.openai.model_name):
        console.print_note(model_note)
    with console.show_progress_bar("building the tiny model", quiet=args.json) as advance:
        service.build_tiny_model(config, advance)


def handle_resume(args: argparse.Namespace) -> int:
    """Continue an ended run, with new limits or more steps if there are any."""
    service = LachesisService()
    if not service.get_run(args.run).has_ended:
        console.print_note(f"run {args.run} has not ended, so nothing was started")
    changes = dict(parse_assignment(text) for text in args.edits)
    record = check_with_server(
        args, service, lambda: service.resume(args.run, changes, by_owner=True)
    )
    return _follow_run(args, service, record)


def _follow_run(args: argparse.Namespace, service: LachesisService, record: RunRecord) -> int:
    """Show that the run was started; with --watch, show its progress until it ends."""
    if args.watch:
        with watch.explain_interrupt([record.run_id]):
            record = watch.watch_until_end(service, record.run_id, quiet=args.json)
        answer = service.get_results(record.run_id).to_payload()
        print_answer(args, answer, show_runs.render_results(answer))
        if record.status == "completed":
            return 0
        return 1
    newest_checkpoint = Checkpoints(service.store.dir(record.run_id).checkpoints).find_newest()
    answer = {
        "run_id": record.run_id,
        "status": record.status,
        "environment": record.environment,
        "model": record.base_model,
        "begins_with": record.forked_from
        or (f"the checkpoint of step {newest_checkpoint.step}" if newest_checkpoint else None),
        "config_path": str(service.store.dir(record.run_id).config),
        "ui_url": submit.get_run_url(record),
    }
    print_answer(args, answer, show_runs.render_started(answer))
    return 0
