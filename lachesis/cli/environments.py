"""`lachesis env` and `lachesis model`: begin an environment, check it, and teach a tiny model the form of its answers."""

from __future__ import annotations

import argparse
import shutil
import tempfile
from dataclasses import asdict
from pathlib import Path

from rich.text import Text

from lachesis.catalog import describe, requirements, scaffold
from lachesis.cli import show
from lachesis.config.edits import parse_assignment
from lachesis.runs import cleanup
from lachesis.service import LaunchRequest, Service
from lachesis.tiny_model import build, teach
from lachesis.validation import check
from lachesis.validation.check import CheckResult

_STYLES = {"passed": "green", "warned": "yellow", "failed": "red", "not offered": "dim"}


def env(args: argparse.Namespace) -> int:
    return {"new": _new, "check": _check, "install": _install}[args.action](args)


def _install(args: argparse.Namespace) -> int:
    """What the file's header requires, in a place of its own."""
    environment = describe.find_environment(describe.register_environment(args.environment))
    file = Path(environment.file_path)
    wanted = requirements.read_requirements(file).dependencies
    if not wanted:
        show.out(args, {"requirements": []}, f"{file} declares no requirements (PEP 723)")
        return 0
    if not args.json:
        show.notice(f"installing {', '.join(wanted)}")
    place = requirements.install_requirements(file)
    answer = {"environment": environment.name, "requirements": wanted, "path": str(place)}
    show.out(
        args, answer, f"{', '.join(wanted)} is installed at {place}, for {environment.name} and those that require the same"
    )
    return 0


def _new(args: argparse.Namespace) -> int:
    folder = Path(args.to).expanduser()
    file = scaffold.write_scaffold(args.name, folder)
    view = "\n".join(
        [
            f"{file} is written. What is next:",
            f"  lachesis env check {file}",
            f"  lachesis model build --for {file}     # a tiny model that knows the form of its answers",
            f"  lachesis test {file}     # takes that model; `lachesis serve` must run for this and the next",
            f"  lachesis train {file} --watch",
        ]
    )
    show.out(args, {"file": str(file)}, view)
    return 0


def _check(args: argparse.Namespace) -> int:
    """Exit code 1 when a check has failed."""
    service = Service()
    launch = LaunchRequest(
        describe.register_environment(args.environment),
        "embedded",
        tuple(parse_assignment(text) for text in args.edits),
        args.model,
        by_owner=True,
    )
    environment, config = service.resolve(launch)
    with show.steps_bar("building the tiny model", quiet=args.json) as advance:
        service.build_model(config, advance)
    cleanup.remove_old_checks()
    folder = Path(tempfile.mkdtemp(prefix=f"{cleanup.CHECK_PREFIX}{environment.name}-"))
    tell = (lambda line: None) if args.json else _show
    try:
        lines = check.run_environment_checks(environment, config, folder, tell)
    except KeyboardInterrupt:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    failed = any(line.status == "failed" for line in lines)
    answer = {
        "environment": environment.name,
        "file_path": environment.file_path,
        "ok": not failed,
        "logs": str(folder) if failed else None,
    }
    if not failed:
        shutil.rmtree(folder, ignore_errors=True)
    told = f"{environment.name} {f'has failed; logs: {folder}' if failed else 'is sound'}"
    show.out(args, {**answer, "checks": [asdict(line) for line in lines]}, told)
    return int(failed)


def _show(line: CheckResult) -> None:
    mark = Text(f"{line.status:12}", style=_STYLES[line.status])
    show.console.print(mark + Text(f"{line.name:17} {line.message}", style=""))


def model(args: argparse.Namespace) -> int:
    if not args.environments:
        with show.steps_bar("building the tiny model", quiet=args.json) as advance:
            path = build.ensure_tiny_model(build.TinyModelRecipe(), progress=advance)
    else:
        edits = tuple(parse_assignment(text) for text in args.edits)
        found = [Service().resolve(LaunchRequest(describe.register_environment(one), "embedded", edits, by_owner=True)) for one in args.environments]
        taught = [(environment, dict(config.env.model_extra or {})) for environment, config in found]
        with show.steps_bar("teaching a tiny model", quiet=args.json) as advance:
            path = teach.ensure_environment_model(*taught, share=args.share, steps=args.steps, progress=advance)
    show.out(args, {"path": str(path)}, f"the model is at {path}")
    return 0
