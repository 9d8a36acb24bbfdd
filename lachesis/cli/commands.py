"""What each command does: ask the service, show the answer, or print it as JSON."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lachesis.base.errors import ModelNotFoundError
from lachesis.base.typed_values import read_untyped
from lachesis.catalog.describe import register_environment
from lachesis.cli import demo, doctor, environments, serve, show, watch
from lachesis.cli.show import out
from lachesis.config.edits import parse_assignment
from lachesis.orchestration import launcher
from lachesis.orchestration.launch_inputs import describe_default_model
from lachesis.orchestration.notifications import remove_notifications, set_notifications
from lachesis.runs import export as weights
from lachesis.runs.checkpoints import Checkpoints
from lachesis.runs.evaluation_results import find_newest_result
from lachesis.runs.metrics import MetricsFile
from lachesis.runs.store import RunRecord, shorten_service_name
from lachesis.service import LaunchRequest, Service
from lachesis.validation.tests import EMBEDDED, TestOptions

LAST_STEPS = 60
"""Steps of each run in which the list of runs looks for a held-out result."""


def run(args: argparse.Namespace) -> int:
    """Run the command; its exit code."""
    handler = {
        "demo": demo_command,
        "serve": serve.prefect,
        "model": environments.model,
        "env": environments.env,
        "envs": envs,
        "train": train,
        "resume": resume,
        "test": test,
        "runs": runs,
        "status": status,
        "stop": stop,
        "results": results,
        "logs": logs,
        "weights": export,
        "report": report,
        "notices": notices,
        "mcp": serve.mcp,
        "api": serve.api,
        "doctor": doctor_command,
    }[args.command]
    return handler(args) or 0


def demo_command(args: argparse.Namespace) -> int:
    return demo.run(Service(), seed=args.seed, steps=args.steps, as_json=args.json)


def envs(args: argparse.Namespace) -> None:
    service = Service()
    if args.name:
        found = service.describe(LaunchRequest(register_environment(args.name), args.profile, by_owner=True))
        out(args, found, show.environment(found))
        return
    scan = service.environments()
    answer = {
        "environments": [asdict(one) for one in scan.environments],
        "problems": scan.problems,
        "clashes": scan.clashes,
    }
    out(args, answer, show.environments(scan))


def train(args: argparse.Namespace) -> int:
    service = Service()
    edits: list[tuple[str, Any]] = [parse_assignment(text) for text in args.edits]
    if args.others:
        edits.append(("env.mixture", dict(map(_other, args.others))))
    wanted = LaunchRequest(
        register_environment(args.environment),
        args.profile,
        tuple(edits),
        args.model,
        args.seed,
        args.require_validation,
        start_from=args.start_from,
        by_owner=True,
    )
    config = service.check(wanted).config
    launcher.require_server(service.store.home)  # before a model is built, which takes a minute
    if taken := describe_default_model(wanted, config.openai.model_name):
        show.notice(taken)
    with show.steps_bar("building the tiny model", quiet=args.json) as advance:
        service.build_model(config, advance)
    return _followed(args, service, service.start(wanted))


def _other(text: str) -> tuple[str, dict[str, Any]]:
    """ENVIRONMENT or ENVIRONMENT=WEIGHT."""
    name, weight = parse_assignment(text if "=" in text else f"{text}=1")
    return register_environment(name), {"weight": read_untyped(weight)}


def resume(args: argparse.Namespace) -> int:
    service = Service()
    if not service.get(args.run).has_ended:
        show.notice(f"run {args.run} has not ended; nothing is started")
    return _followed(args, service, service.resume(args.run, dict(parse_assignment(text) for text in args.edits)))


def _followed(args: argparse.Namespace, service: Service, record: RunRecord) -> int:
    """Show where the run is, or with --watch what it does until it ends."""
    if args.watch:
        record = watch.until_end(service, record.run_id, quiet=args.json)
        answer = service.results(record.run_id).to_payload()
        out(args, answer, show.results(answer))
        return 0 if record.status == "completed" else 1
    newest = Checkpoints(service.store.dir(record.run_id).checkpoints).find_newest()
    answer = {
        "run_id": record.run_id,
        "status": record.status,
        "environment": record.environment,
        "model": record.base_model,
        "begins_with": record.forked_from or (f"the checkpoint of step {newest.step}" if newest else None),
        "config_path": str(service.store.dir(record.run_id).config),
        "ui_url": launcher.get_run_url(record),
    }
    out(args, answer, show.started(answer))
    return 0


def test(args: argparse.Namespace) -> int:
    """Waits for the end; Ctrl-C leaves the test running."""
    service = Service()
    edits = tuple(parse_assignment(text) for text in args.edits)
    prompted = {"max_tokens": 256, "temperature": 1.0} if args.prompt else {}
    wanted = TestOptions(
        num_steps=args.steps, group_size=args.group_size, models=_tested_models(args), prompts=args.prompt, **prompted
    )
    launch = LaunchRequest(register_environment(args.environment), args.profile, edits, _trained_model(args), by_owner=True)
    try:
        config = service.check_test(launch, wanted)[0].config
    except ModelNotFoundError as error:
        raise ModelNotFoundError(f"{error}; a model at an endpoint is named with --endpoint-model NAME") from error
    launcher.require_server(service.store.home)  # before a model is built, which takes a minute
    if taken := describe_default_model(launch, config.openai.model_name):
        show.notice(taken)
    with show.steps_bar("building the tiny model", quiet=args.json) as advance:
        service.build_model(config, advance)
    started = service.start_test(launch, wanted)
    show.notice(f"test {started.test_id}: {service.tests.dir(started.test_id)}")
    with show.steps_bar("groups", quiet=args.json) as advance:
        while not (found := service.test(started.test_id)).has_ended:
            advance(service.tests.count_finished_groups(found), found.request.num_steps * len(found.request.models))
            time.sleep(0.5)
    out(args, found.model_dump(mode="json"), show.tested(found, _train_command(args)))
    return 0 if (found.result or {}).get("summary", {}).get("environment_working") else 1


def _trained_model(args: argparse.Namespace) -> str | None:
    """Return what `train --model` would be for a test: the model of its only --model on this machine, or None."""
    names = [_place(name) for name in args.model or []]
    return names[0] if len(names) == 1 and args.profile == "embedded" else None


def _tested_models(args: argparse.Namespace) -> list[str] | None:
    """Return the models of a test as the service names them, or None for the default."""
    names = [f"{EMBEDDED}{_place(name)}" if _is_local(args, name) else name for name in args.model or []]
    return [*names, *(args.endpoint_model or [])] or None


def _is_local(args: argparse.Namespace, name: str) -> bool:
    """Return whether the engine of this machine serves the model of a test's --model."""
    return args.profile == "embedded" or name.startswith(EMBEDDED) or Path(name).is_dir()


def _place(name: str) -> str:
    """Return the model's name, or the whole path of its folder."""
    name = name.removeprefix(EMBEDDED)
    return str(Path(name).resolve()) if Path(name).is_dir() else name


def _train_command(args: argparse.Namespace) -> str:
    """For what was tested, as it was given."""
    trained = _trained_model(args)
    model = ["--model", trained] if trained else []
    edits = [part for text in args.edits for part in ("--set", text)]
    profile = ["--profile", args.profile] if args.profile != os.environ.get("LACHESIS_PROFILE", "embedded") else []
    return shlex.join(["lachesis", "train", args.environment, *profile, *model, *edits, "--require-validation", "--watch"])


def runs(args: argparse.Namespace) -> None:
    service = Service()
    records, warning = service.look_at_runs()
    shown = {"run_id", "environment", "status", "wandb_run_name", "profile", "created_at"}
    rows = [
        {
            **record.model_dump(include=shown),
            "learning": record.learning,
            "evidence": record.evidence,
            "held_out": _newest_held_out(service, record),
        }
        for record in records
    ]
    if warning:
        show.notice(warning)
    out(args, {"runs": rows, "count": len(rows)}, show.runs(rows))


def _newest_held_out(service: Service, record: RunRecord) -> dict[str, Any] | None:
    """Return the newest held-out result that the last steps of a run hold.

    Metrics that cannot be read count as none: they must not hide the other runs. The run's status
    names what is wrong with them.
    """
    try:
        steps = MetricsFile(service.store.dir(record.run_id).metrics).tail(LAST_STEPS)
    except OSError:
        steps = []
    point = find_newest_result(record, steps)
    return point.model_dump() if point else None


def status(args: argparse.Namespace) -> None:
    answer = Service().status(args.run).to_payload()
    out(args, answer, show.status(answer))


def stop(args: argparse.Namespace) -> None:
    """Waits until the run has ended, at most a minute: people expect it to be over."""
    service = Service()
    lived = not service.get(args.run).has_ended
    answer = service.stop(args.run, now=args.now)
    launcher.wait_until(lambda: service.get(args.run).has_ended, timeout_s=60)
    answer["status"] = service.get(args.run).status
    saved = Checkpoints(service.store.dir(args.run).checkpoints).find_newest()
    where = f"goes on from its checkpoint of step {saved.step}" if saved else "begins it again, as it has no checkpoint"
    told = f"run {args.run} is {answer['status']}; `lachesis resume {args.run}` {where}"
    out(args, answer, told if lived and answer["status"] == "stopped" else answer["message"])


def results(args: argparse.Namespace) -> None:
    answer = Service().results(args.run).to_payload()
    out(args, answer, show.results(answer))


def logs(args: argparse.Namespace) -> None:
    service = Service()
    name = args.service or shorten_service_name(service.store.load(args.run).failed_service or "trainer")
    path, text, position = service.log(args.run, name, args.lines)
    if args.json:
        answer = {"run_id": args.run, "service": name, "path": str(path), "lines": text.splitlines()}
        print(json.dumps(answer, indent=2))
        return
    print(text or f"{path} is empty or not there yet")
    while args.follow:
        ended = service.get(args.run).has_ended  # asked before the read, so that the last lines are not missed
        position = _print_from(path, position)
        if ended:
            return
        time.sleep(0.5)


def _print_from(path: Path, position: int) -> int:
    if not path.exists():
        return position
    with path.open("rb") as file:
        if path.stat().st_size < position:
            position = 0  # a new file after the old one had become too large
        file.seek(position)
        print(file.read().decode(errors="replace"), end="", flush=True)
        return file.tell()


def export(args: argparse.Namespace) -> None:
    """Export the weights of a run. Those that are not what was trained raise CheckpointError."""
    service = Service()
    record = service.get(args.run)
    target = Path(args.to).expanduser()
    note = weights.export(
        record,
        service.store.dir(args.run),
        target,
        checkpoint=args.checkpoint,
        merged=args.merged,
        verify=not args.no_verify,
    )
    out(args, note, show.exported(note))


def report(args: argparse.Namespace) -> None:
    files = Service().report(args.run, Path(args.to).expanduser() if args.to else None)
    out(args, {"files": [str(file) for file in files]}, "\n".join(str(file) for file in files))


def notices(args: argparse.Namespace) -> None:
    names = remove_notifications() if args.remove else set_notifications(args.webhook)
    done = "removed" if args.remove else f"call {args.webhook}"
    out(args, {"automations": names, "webhook": args.webhook}, f"{', '.join(names) or 'no automation'}: {done}")


def doctor_command(args: argparse.Namespace) -> int:
    if args.fix:
        done = [one.clean_up() for one in doctor.leftovers()]
        out(args, {"done": done}, "\n".join(done) or "nothing is left of dead runs")
        return 0
    checks = doctor.examine()
    out(args, {"checks": [asdict(check) for check in checks]}, show.checks(checks))
    return 0 if all(check.ok or not check.needed for check in checks) else 1
