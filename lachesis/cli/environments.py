"""Run `lachesis envs`, `lachesis env` and `lachesis model`: list environments, create and check
one, and build a tiny model.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import tempfile
from dataclasses import asdict
from pathlib import Path

from rich.text import Text

from lachesis.cli import console, show_environments
from lachesis.cli.console import print_answer
from lachesis.cli.model_memory import handle_model_memory
from lachesis.config.field_edits import parse_assignment
from lachesis.environment_catalog import lookup, new_environment, requirements
from lachesis.environment_check.check import CheckResult, run_environment_checks
from lachesis.operations.service import LachesisService, LaunchRequest
from lachesis.supervision import leftovers
from lachesis.tiny_model import build, teach

_STYLES = {"passed": "green", "warned": "yellow", "failed": "red", "not offered": "dim"}


def handle_envs(args: argparse.Namespace) -> None:
    """Print the environments, or the fields of one."""
    service = LachesisService()
    if args.name:
        launch_description = service.describe(
            LaunchRequest(lookup.register_environment(args.name), args.profile, by_owner=True)
        )
        print_answer(
            args,
            launch_description,
            show_environments.render_environment(launch_description, show_all=args.all),
        )
        return
    scan = service.list_environments()
    answer = {
        "environments": [asdict(environment) for environment in scan.environments],
        "problems": scan.problems,
        "clashes": scan.clashes,
    }
    print_answer(args, answer, show_environments.render_environments(scan))


def handle_env(args: argparse.Namespace) -> int:
    """Create an environment, check one, or install what one requires."""
    return {
        "new": _create_environment,
        "check": _check_environment,
        "install": _install_requirements,
    }[args.action](args)


def _install_requirements(args: argparse.Namespace) -> int:
    """Install the requirements in the file's header into a folder of their own."""
    environment = lookup.find_environment(lookup.register_environment(args.environment))
    file = Path(environment.file_path)
    dependencies = requirements.read_requirements(file).dependencies
    if not dependencies:
        console.print_answer(
            args, {"requirements": []}, f"{file} declares no requirements (PEP 723)"
        )
        return 0
    if not args.json:
        console.print_note(f"installing {', '.join(dependencies)}")
    folder = requirements.install_requirements(file)
    answer = {"environment": environment.name, "requirements": dependencies, "path": str(folder)}
    console.print_answer(
        args,
        answer,
        f"{', '.join(dependencies)} is installed at {folder}, for {environment.name} and other "
        f"environments with the same requirements",
    )
    return 0


def _create_environment(args: argparse.Namespace) -> int:
    folder = Path(args.to).expanduser()
    file = new_environment.write_scaffold(args.name, folder)
    word = shlex.quote(str(file))
    view = "\n".join(
        [
            f"{file} was created. Next steps:",
            f"  lachesis env check {word}",
            f"  lachesis model build --for {word}     # builds a tiny model pretrained on its "
            f"answer format",
            f"  lachesis test {word}     # uses that model; this and the next need `lachesis "
            f"serve`",
            f"  lachesis train {word} --watch",
        ]
    )
    console.print_answer(args, {"file": str(file)}, view)
    return 0


def _check_environment(args: argparse.Namespace) -> int:
    """Check an environment and return exit code 1 if a check has failed."""
    service = LachesisService()
    launch = LaunchRequest(
        lookup.register_environment(args.environment),
        "embedded",
        tuple(parse_assignment(text) for text in args.edits),
        args.model,
        by_owner=True,
    )
    resolved = service.resolve(launch)
    environment, config = resolved.environment, resolved.config
    with console.show_progress_bar("building the tiny model", quiet=args.json) as advance:
        service.build_tiny_model(config, advance)
    leftovers.remove_old_checks()
    folder = Path(tempfile.mkdtemp(prefix=f"{leftovers.CHECK_PREFIX}{environment.name}-"))
    report_line = (lambda line: None) if args.json else _print_line
    try:
        lines = run_environment_checks(environment, config, folder, report_line)
    except KeyboardInterrupt:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    has_failed = any(line.status == "failed" for line in lines)
    answer = {
        "environment": environment.name,
        "file_path": environment.file_path,
        "ok": not has_failed,
        "logs": str(folder) if has_failed else None,
    }
    if not has_failed:
        shutil.rmtree(folder, ignore_errors=True)
    outcome = f"has failed; logs: {folder}" if has_failed else "passed every check"
    summary = f"{environment.name} {outcome}"
    console.print_answer(args, {**answer, "checks": [asdict(line) for line in lines]}, summary)
    return int(has_failed)


def _print_line(line: CheckResult) -> None:
    mark = Text(f"{line.status:12}", style=_STYLES[line.status])
    console.print_sentence(mark + Text(f"{line.name:17} {line.message}", style=""))


def handle_model(args: argparse.Namespace) -> int:
    """Build a tiny model, or forecast the memory of a model."""
    if args.action == "memory":
        return handle_model_memory(args)
    if not args.environments:
        with console.show_progress_bar("building the tiny model", quiet=args.json) as advance:
            path = build.ensure_tiny_model(build.TinyModelRecipe(), progress=advance)
    else:
        edits = tuple(parse_assignment(text) for text in args.edits)
        launches = [
            LachesisService().resolve(
                LaunchRequest(lookup.register_environment(name), "embedded", edits, by_owner=True)
            )
            for name in args.environments
        ]
        taught_environments = [
            (launch.environment, dict(launch.config.env.model_extra or {})) for launch in launches
        ]
        with console.show_progress_bar("pretraining a tiny model", quiet=args.json) as advance:
            path = teach.ensure_environment_model(
                *taught_environments, share=args.share, steps=args.steps, progress=advance
            )
    console.print_answer(args, {"path": str(path)}, f"the model is at {path}")
    return 0
