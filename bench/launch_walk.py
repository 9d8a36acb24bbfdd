"""Count which files a launch opens: until its first service starts, and while the run trains.

python bench/launch_walk.py [--former FOLDER] [--seconds 60]

A checkout of a former version is measured first, as after `git worktree add FOLDER eb4fcaa`. What
Python itself opens is counted, in every process of the home; databases are not.
"""

import argparse
import collections
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from table import show

from lachesis.base.waiting import wait_until

ROOT = Path(__file__).resolve().parents[1]
HOOK = ROOT / "bench" / "programs" / "counted" / "sitecustomize.py"
PROGRAM = (sys.executable, "-c", "from lachesis.cli.main import main; raise SystemExit(main())")
TRAIN = ("train", "arithmetic", "--set", "total_steps=100000", "--set", "use_wandb=false")
ENVIRONMENT = "arithmetic.py"
# What is left out of the names of files: the run's id, where the environment lies, and hashes.
LEFT_OUT = re.compile(r"^/runs/[0-9a-f]{8}|^/.*/(?=arithmetic\.py$)|[0-9a-f]{32}(?=\.json$)")
# Files that are renamed once they are whole, and locks.
TEMPORARY = re.compile(r"\.[0-9a-f]{6}$|\.lock$")
# How long after the first step the minute begins.
SETTLE_S = 10.0
# By their command lines, in this version and in former ones.
FLOW = re.compile(r"-m prefect\.(engine|flow_engine)")
SERVICE = re.compile(r"-m lachesis\.(engine|tinker_server|rollout_api|trainer)\b")


@dataclass(frozen=True)
class Event:
    """Hold a file that a process has opened (`read`, `write`) or replaced (`synced`)."""

    at: float
    command: str
    kind: str
    file: str


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--former", type=Path)
    parser.add_argument("--seconds", type=float, default=60.0)
    args = parser.parse_args()
    checkouts = {"former": args.former.resolve(), "now": ROOT} if args.former else {"now": ROOT}
    walks = [walk(checkout, args.seconds) for checkout in checkouts.values()]
    titles = (
        "from `lachesis train` until the first service starts, all processes",
        "the process of the flow until all services are ready",
        f"{args.seconds:g} s of training, the process of the flow",
        "most opens by one process until the first service starts",
    )
    for title, *counts in zip(titles, *walks, strict=True):
        keys = sorted(set().union(*counts), key=lambda key: [-count[key] for count in counts])
        rows = [[*key, *(count[key] for count in counts)] for key in keys]
        show(title, ["file", "what", *checkouts], rows)


def walk(checkout: Path, seconds: float) -> list[collections.Counter[tuple[str, str]]]:
    """Launch a run of the checkout, and return the counts of each table."""
    with tempfile.TemporaryDirectory() as text:
        folder, home = Path(text), Path(text) / "home"
        (folder / "hook" / "notes").mkdir(parents=True)
        shutil.copy(HOOK, folder / "hook")
        paths = f"{folder / 'hook'}{os.pathsep}{checkout}"
        env = {**os.environ, "LACHESIS_HOME": str(home), "PYTHONPATH": paths}
        call(folder, env, "model", "build")
        with serving(folder, env):
            launched_at = time.time()
            call(folder, env, *TRAIN)
            run_id = wait_for_run(home, lambda record: record["status"] == "running")["run_id"]
            ready_at = time.time()
            time.sleep(SETTLE_S)
            trained_at = time.time()
            time.sleep(seconds)
            ended_at = time.time()
            call(folder, env, "stop", run_id)
            wait_for_run(home, lambda record: record["ended_at"] is not None)
        events = read_events(folder / "hook" / "notes", home)
    first_service_at = min(
        event.at for event in events if SERVICE.search(event.command) and event.at > launched_at
    )
    starting = [event for event in events if launched_at < event.at < first_service_at]
    of_flow = [event for event in events if FLOW.search(event.command)]
    until_ready = [event for event in of_flow if launched_at < event.at < ready_at]
    training = [event for event in of_flow if trained_at < event.at < ended_at]
    by_process = [
        count(event for event in starting if event.command == command)
        for command in {event.command for event in starting}
    ]
    most = {key: max(counts[key] for counts in by_process) for key in count(starting)}
    return [count(starting), count(until_ready), count(training), collections.Counter(most)]


def call(folder: Path, env: Mapping[str, str], *words: str) -> None:
    """Run a command of the checkout."""
    subprocess.run([*PROGRAM, *words], cwd=folder, env=env, check=True, stdout=subprocess.DEVNULL)


@contextlib.contextmanager
def serving(folder: Path, env: Mapping[str, str]) -> Iterator[None]:
    """Run `lachesis serve` during the block."""
    with (folder / "serve.log").open("w") as log:
        served = subprocess.Popen([*PROGRAM, "serve"], cwd=folder, env=env, stdout=log, stderr=log)
    try:
        wait_until(lambda: "ready" in (folder / "serve.log").read_text(), timeout_s=120)
        yield
    finally:
        served.send_signal(signal.SIGINT)
        served.wait()


def wait_for_run(home: Path, has_come: Callable[[Any], bool]) -> Any:
    """Return the record of the only run once it is as it should be."""

    def read_record() -> Any:
        return json.loads(next(home.glob("runs/*/run.json")).read_text())

    if not wait_until(lambda: any(home.glob("runs/*/run.json")) and has_come(read_record()), 120):
        raise SystemExit("the run has not come as far in 120 s")
    return read_record()


def read_events(notes: Path, home: Path) -> list[Event]:
    """Return the events of files of the home and of the environment, each process's first first."""
    events = []
    for file in notes.iterdir():
        rows = [line.split("\t") for line in file.read_text().splitlines()]
        command = f"{rows[0][2]} ({file.stem})"
        for at, kind, text in rows:
            name = LEFT_OUT.sub("", text.replace(str(home), "")).strip("/")
            is_counted = text.startswith(str(home)) and not TEMPORARY.search(name)
            if kind == "start" or is_counted or name == ENVIRONMENT:
                events.append(Event(float(at), command, kind, name))
    return events


def count(events: Iterable[Event]) -> collections.Counter[tuple[str, str]]:
    """Count the events of each file and kind."""
    return collections.Counter(
        (event.file, event.kind) for event in events if event.kind != "start"
    )


if __name__ == "__main__":
    main()
