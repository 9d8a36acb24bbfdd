"""Run the commands that show, stop or report one run."""

from __future__ import annotations

import argparse
import webbrowser
from pathlib import Path

from lachesis.base import waiting
from lachesis.base.errors import RunStateError
from lachesis.checkpoints.manifests import Checkpoints
from lachesis.cli import show_runs
from lachesis.cli.console import print_answer, print_note
from lachesis.operations.service import LachesisService
from lachesis.prefect_client import submit
from lachesis.prefect_client.background_serve import require_server
from lachesis.runs.provenance import read_provenance


def handle_status(args: argparse.Namespace) -> None:
    """Print the status of a run."""
    service = LachesisService()
    answer = service.get_status(args.run).to_payload()
    view = show_runs.render_status(answer)
    provenance = read_provenance(service.store.dir(args.run))
    print_answer(args, {**answer, "provenance": provenance}, view)


def handle_stop(args: argparse.Namespace) -> None:
    """Stop a run and wait at most a minute for its end."""
    service = LachesisService()
    was_alive = not service.get_run(args.run).has_ended
    answer = service.stop(args.run, now=args.now)
    waiting.wait_until(lambda: service.get_run(args.run).has_ended, timeout_s=60)
    record = service.get_run(args.run)
    answer["status"] = record.status
    newest_checkpoint = Checkpoints(service.store.dir(args.run).checkpoints).find_newest()
    if newest_checkpoint:
        resume_effect = f"continues from its checkpoint of step {newest_checkpoint.step}"
    else:
        resume_effect = "starts it from the beginning, because it has no checkpoint"
    if was_alive and record.status == "stopped":
        answer["message"] = (
            f"run {args.run} is stopped; `lachesis resume {args.run}` {resume_effect}"
        )
    elif was_alive and record.has_ended:
        answer["message"] = (
            f"run {args.run} is {record.status}; it ended before it could be stopped"
        )
    print_answer(args, answer, answer["message"])


def handle_results(args: argparse.Namespace) -> None:
    """Print the results of a run."""
    answer = LachesisService().get_results(args.run).to_payload()
    print_answer(args, answer, show_runs.render_results(answer))


def handle_open(args: argparse.Namespace) -> None:
    """Open the page of a run in Prefect, and print its address.

    Raises:
        ServerDownError: No Prefect server runs here.
        RunStateError: The run has no page, because it was never submitted.
    """
    service = LachesisService()
    require_server(service.store.home)
    url = submit.get_run_url(service.get_run(args.run))
    if url is None:
        raise RunStateError(f"run {args.run} has no page, because Prefect has never seen it")
    is_opened = not args.json and webbrowser.open(url)
    text = url if is_opened else f"{url} (no browser was found here)"
    print_answer(args, {"run_id": args.run, "url": url}, text)


def handle_report(args: argparse.Namespace) -> None:
    """Write the report of a run and print its files."""
    files = LachesisService().write_report(
        args.run, Path(args.to).expanduser() if args.to else None
    )
    print_answer(
        args, {"files": [str(file) for file in files]}, "\n".join(str(file) for file in files)
    )
    if args.open and not webbrowser.open(files[0].resolve().as_uri()):
        print_note("no browser was found here; the first file is the page")
