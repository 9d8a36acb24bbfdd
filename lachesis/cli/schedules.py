"""Run `lachesis schedule`, `lachesis schedules` and `lachesis unschedule`."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace

from rich.console import Group, RenderableType
from rich.text import Text

from lachesis.cli.console import format_local_time, print_answer
from lachesis.cli.launch_options import read_launch_request
from lachesis.cli.train import confirm_cost, show_warnings
from lachesis.orchestration import schedules
from lachesis.orchestration.confirmation import require_confirmation
from lachesis.orchestration.flow_parameters import make_scheduled_parameters
from lachesis.service import LachesisService


def handle_schedule(args: argparse.Namespace) -> int:
    """Check a launch and create a schedule that starts it."""
    service = LachesisService()
    request = read_launch_request(args, service)
    if args.start_from in schedules.LAST_RUN_CHECKPOINTS:
        request = replace(request, start_from=None)
    launch = service.check(request)
    show_warnings(launch)
    confirmed = confirm_cost(args, service, launch)
    if confirmed is None:
        print_answer(args, {"schedule": None}, "nothing was scheduled")
        return 1
    request = confirmed.request
    require_confirmation(confirmed, None)
    parameters = make_scheduled_parameters(
        request, launch.environment.file_path, launch.set_fields, args.start_from
    )
    name = schedules.create_schedule(service.store.home, args.cron, args.timezone, parameters)
    answer = {
        "schedule": name,
        "cron": args.cron,
        "timezone": args.timezone,
        "parameters": parameters,
    }
    text = (
        f"schedule {name} starts a training at {args.cron} ({args.timezone}) while `lachesis "
        f"serve` runs;\n`lachesis schedules` lists it, `lachesis unschedule {name}` removes it"
    )
    print_answer(args, answer, text)
    return 0


def handle_schedules(args: argparse.Namespace) -> None:
    """Print all schedules of trainings."""
    entries = schedules.list_schedules(LachesisService().store)
    answer = {"schedules": [entry.to_payload() for entry in entries], "count": len(entries)}
    print_answer(args, answer, render_schedules(entries))


def handle_unschedule(args: argparse.Namespace) -> None:
    """Remove a schedule."""
    schedules.remove_schedule(LachesisService().store.home, args.schedule)
    answer = {"schedule": args.schedule, "message": "removed; runs that it has started go on"}
    print_answer(args, answer, f"schedule {args.schedule} is removed; its runs go on")


def render_schedules(entries: list[schedules.TrainingSchedule]) -> RenderableType:
    """Return the list of schedules, three lines for each."""
    if not entries:
        return Text(
            "no schedules yet; `lachesis schedule ENV --cron '0 2 * * *'` makes one, and the page "
            "of the deployment `train` in Prefect another"
        )
    lines = []
    for entry in entries:
        line = Text(f"{entry.name}  ", style="bold")
        line.append(f"{entry.when} ({entry.timezone})", style="")
        if not entry.active:
            line.append("  paused", style="yellow")
        lines.append(line)
        next_start = "not planned yet"
        if entry.next_start:
            next_start = format_local_time(entry.next_start)
        last_run = f"run {entry.last_run}: {entry.last_status}" if entry.last_run else "none"
        lines.append(Text(f"    next start: {next_start}; last run: {last_run}", style="dim"))
        parameters = ", ".join(
            f"{name}={value if isinstance(value, str) else json.dumps(value)}"
            for name, value in entry.parameters.items()
        ).replace("\n", " ")
        lines.append(Text(f"    {parameters}", style="dim", no_wrap=True, overflow="ellipsis"))
    return Group(*lines)
