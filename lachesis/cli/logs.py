"""Print the log of one process of a run, and follow it until the run ends."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from lachesis.operations.service import LachesisService
from lachesis.runs.folder import shorten_service_name


def handle_logs(args: argparse.Namespace) -> None:
    """Print the end of a log, and follow it if that was asked for."""
    service = LachesisService()
    name = args.service or shorten_service_name(
        service.store.load(args.run).failed_service or "trainer"
    )
    path, text, position = service.read_log(args.run, name, args.lines)
    if args.json:
        answer = {
            "run_id": args.run,
            "service": name,
            "path": str(path),
            "lines": text.splitlines(),
        }
        print(json.dumps(answer, indent=2))
        return
    print(text or f"{path} is empty or does not exist yet")
    while args.follow:
        # checked before reading, so that the last lines are not missed
        ended = service.get_run(args.run).has_ended
        position = _print_new_output(path, position)
        if ended:
            return
        time.sleep(0.5)


def _print_new_output(path: Path, position: int) -> int:
    if not path.exists():
        return position
    with path.open("rb") as file:
        if path.stat().st_size < position:
            position = 0  # the log was rotated, so this is a new file
        file.seek(position)
        print(file.read().decode(errors="replace"), end="", flush=True)
        return file.tell()
