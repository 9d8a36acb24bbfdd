"""Run each command: call the service, then print its answer as a table or as JSON."""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from lachesis.base import waiting
from lachesis.base.errors import ModelNotFoundError
from lachesis.base.typed_values import read_untyped
from lachesis.catalog.describe import register_environment
from lachesis.cli import (
    console,
    demo,
    doctor,
    environments,
    logs,
    metrics,
    rollouts,
    schedules,
    serve,
    show_environments,
    show_runs,
    show_tests,
    watch,
)
from lachesis.cli.console import print_answer
from lachesis.cli.launch_options import read_launch_request
from lachesis.cli.tested_models import find_trained_model, format_train_command, list_tested_models
from lachesis.config.edits import parse_assignment
from lachesis.orchestration import server, submit
from lachesis.orchestration.launch_inputs import describe_default_model
from lachesis.orchestration.notifications import remove_notifications, set_notifications
from lachesis.orchestration.resolved_launch import ResolvedLaunch
from lachesis.runs import export as weights
from lachesis.runs.checkpoints import Checkpoints
from lachesis.runs.evaluation_results import find_newest_result
from lachesis.runs.metrics import MetricsFile
from lachesis.runs.provenance import read_provenance
from lachesis.runs.run_ids import resolve_checkpoint_name, resolve_run_id
from lachesis.runs.run_record import RunRecord
from lachesis.runs.store import RunStore
from lachesis.service import LachesisService, LaunchRequest
from lachesis.validation.inference_tests import InferenceTest, TestOptions

# Last steps of each run that the list of runs searches for a held-out result.
MAX_HELD_OUT_STEPS = 60


def run_command(args: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    handler = {
        "demo": handle_demo,
        "serve": serve.handle_serve,
        "model": environments.handle_model,
        "env": environments.handle_env,
        "envs": handle_envs,
        "train": handle_train,
        "resume": handle_resume,
        "test": handle_test,
        "runs": handle_runs,
        "status": handle_status,
        "stop": handle_stop,
        "results": handle_results,
        "metrics": metrics.handle_metrics,
        "rollouts": rollouts.handle_rollouts,
        "logs": logs.handle_logs,
        "weights": handle_weights,
        "report": handle_report,
        "schedule": schedules.handle_schedule,
        "schedules": schedules.handle_schedules,
        "unschedule": schedules.handle_unschedule,
        "notifications": handle_notifications,
        "mcp": serve.handle_mcp,
        "api": serve.handle_api,
        "doctor": handle_doctor,
    }[args.command]
    _resolve_runs(args)
    return handler(args) or 0


def _resolve_runs(args: argparse.Namespace) -> None:
    """Replace a beginning of a run's id, or `@last`, by the id."""
    store = RunStore()
    if getattr(args, "run", None):
        args.run = resolve_run_id(store, args.run)
    if getattr(args, "start_from", None) and args.command == "train":
        args.start_from = resolve_checkpoint_name(store, args.start_from)


def handle_demo(args: argparse.Namespace) -> int:
    """Run `lachesis demo`."""
    return demo.run_demo(LachesisService(), seed=args.seed, steps=args.steps, as_json=args.json)


def handle_envs(args: argparse.Namespace) -> None:
    """Print the environments, or the fields of one."""
    service = LachesisService()
    if args.name:
        launch_description = service.describe(
            LaunchRequest(register_environment(args.name), args.profile, by_owner=True)
        )
        print_answer(
            args, launch_description, show_environments.render_environment(launch_description)
        )
        return
    scan = service.list_environments()
    answer = {
        "environments": [asdict(environment) for environment in scan.environments],
        "problems": scan.problems,
        "clashes": scan.clashes,
    }
    print_answer(args, answer, show_environments.render_environments(scan))


def handle_train(args: argparse.Namespace) -> int:
    """Check a launch, start the run, and watch it if that was asked for."""
    service = LachesisService()
    launch = read_launch_request(args)
    if args.others:
        weights_by_name = dict(map(_parse_mixture_item, args.others))
        launch = replace(launch, edits=(*launch.edits, ("env.mixture", weights_by_name)))
    resolved = service.check(replace(launch, start_from=args.start_from, by_owner=True))
    _prepare_model(args, service, resolved)
    return _follow_run(args, service, service.start(resolved))


def _prepare_model(
    args: argparse.Namespace, service: LachesisService, launch: ResolvedLaunch
) -> None:
    """Build the tiny model if the launch needs it, and show the progress."""
    # Building takes a minute, so what can be refused before it is refused before it.
    server.require_server(service.store.home)
    config = launch.config
    if model_note := describe_default_model(launch.request, config.openai.model_name):
        console.print_note(model_note)
    with console.show_progress_bar("building the tiny model", quiet=args.json) as advance:
        service.build_tiny_model(config, advance)


def _parse_mixture_item(text: str) -> tuple[str, dict[str, Any]]:
    """Parse ENVIRONMENT or ENVIRONMENT=WEIGHT."""
    name, weight = parse_assignment(text if "=" in text else f"{text}=1")
    return register_environment(name), {"weight": read_untyped(weight)}


def handle_resume(args: argparse.Namespace) -> int:
    """Continue an ended run, with new limits if there are any."""
    service = LachesisService()
    if not service.get_run(args.run).has_ended:
        console.print_note(f"run {args.run} has not ended, so nothing was started")
    return _follow_run(
        args, service, service.resume(args.run, dict(parse_assignment(text) for text in args.edits))
    )


def _follow_run(args: argparse.Namespace, service: LachesisService, record: RunRecord) -> int:
    """Show that the run was started; with --watch, show its progress until it ends."""
    if args.watch:
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


def handle_test(args: argparse.Namespace) -> int:
    """Run an inference test and wait for its end; Ctrl-C leaves the test running."""
    service = LachesisService()
    prompt_options = {"max_tokens": 256, "temperature": 1.0} if args.prompt else {}
    options = TestOptions(
        num_steps=args.steps,
        group_size=args.group_size,
        models=list_tested_models(args),
        prompts=args.prompt,
        **prompt_options,
    )
    launch = LaunchRequest(
        register_environment(args.environment),
        args.profile,
        tuple(parse_assignment(text) for text in args.edits),
        find_trained_model(args),
        by_owner=True,
    )
    try:
        resolved = service.check_test(launch, options)
    except ModelNotFoundError as error:
        raise ModelNotFoundError(
            f"{error}; a model at an endpoint is named with --endpoint-model NAME"
        ) from error
    _prepare_model(args, service, resolved.launch)
    test = _wait_for_test(args, service, service.start_test(resolved, options))
    print_answer(
        args,
        test.model_dump(mode="json"),
        show_tests.render_test(test, format_train_command(args)),
    )
    if (test.result or {}).get("summary", {}).get("environment_working"):
        return 0
    return 1


def _wait_for_test(
    args: argparse.Namespace, service: LachesisService, test: InferenceTest
) -> InferenceTest:
    """Show the progress of a test until it has ended, and return it."""
    console.print_note(f"test {test.test_id}: {service.tests.dir(test.test_id)}")
    num_groups = test.request.num_steps * len(test.request.models)
    with console.show_progress_bar("groups", quiet=args.json) as advance:
        while not (test := service.get_test(test.test_id)).has_ended:
            advance(service.tests.count_finished_groups(test), num_groups)
            time.sleep(0.5)
    return test


def handle_runs(args: argparse.Namespace) -> None:
    """Print all runs with their newest held-out result."""
    service = LachesisService()
    records, warning = service.list_runs_with_warning()
    entry_fields = {"run_id", "environment", "status", "wandb_run_name", "profile", "created_at"}
    rows = [
        {
            **record.model_dump(include=entry_fields),
            "learning": record.learning,
            "evidence": record.evidence,
            "stalled": record.stall_text,
            "held_out": _read_newest_held_out(service, record),
        }
        for record in records
    ]
    if warning:
        console.print_note(warning)
    print_answer(args, {"runs": rows, "count": len(rows)}, show_runs.render_runs(rows))


def _read_newest_held_out(service: LachesisService, record: RunRecord) -> dict[str, Any] | None:
    """Return the newest held-out result in the last steps of a run.

    Metrics that cannot be read count as none, so that the other runs are still listed. The status
    of the run reports the problem.
    """
    try:
        steps = MetricsFile(service.store.dir(record.run_id).metrics).tail(MAX_HELD_OUT_STEPS)
    except OSError:
        steps = []
    point = find_newest_result(record, steps)
    if point:
        return point.model_dump()
    return None


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


def handle_weights(args: argparse.Namespace) -> None:
    """Export the weights of a run.

    Raises:
        CheckpointError: The exported weights differ from those that were trained.
    """
    service = LachesisService()
    record = service.get_run(args.run)
    target = Path(args.to).expanduser()
    note = weights.export(
        record,
        service.store.dir(args.run),
        target,
        checkpoint=args.checkpoint,
        merged=args.merged,
        verify=not args.no_verify,
    )
    print_answer(args, note, show_runs.render_export(note))


def handle_report(args: argparse.Namespace) -> None:
    """Write the report of a run and print its files."""
    files = LachesisService().write_report(
        args.run, Path(args.to).expanduser() if args.to else None
    )
    print_answer(
        args, {"files": [str(file) for file in files]}, "\n".join(str(file) for file in files)
    )


def handle_notifications(args: argparse.Namespace) -> None:
    """Set or remove the web address that the Prefect server calls."""
    if args.remove:
        names = remove_notifications()
    else:
        names = set_notifications(args.webhook)
    outcome = "removed" if args.remove else f"call {args.webhook}"
    print_answer(
        args,
        {"automations": names, "webhook": args.webhook},
        f"{', '.join(names) or 'no automation'}: {outcome}",
    )


def handle_doctor(args: argparse.Namespace) -> int:
    """Check this machine, and clean up if that was asked for."""
    if args.fix:
        messages = [leftover.clean_up() for leftover in doctor.find_home_leftovers()]
        print_answer(
            args, {"done": messages}, "\n".join(messages) or "dead runs have left nothing behind"
        )
        return 0
    checks = doctor.run_checks()
    print_answer(
        args, {"checks": [asdict(check) for check in checks]}, console.render_checks(checks)
    )
    if all(check.ok or not check.needed for check in checks):
        return 0
    return 1
