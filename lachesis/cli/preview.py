"""Show what `lachesis train` would start, for --dry-run; nothing is written."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from lachesis.base.json_text import Json
from lachesis.base.secrets import redact
from lachesis.cli.console import print_answer
from lachesis.cli.layout import make_lines, make_pairs_table
from lachesis.cli.show_tests import format_forecast
from lachesis.config.profiles import PROFILES, list_missing_keys
from lachesis.inference_tests.required_test import make_test_command
from lachesis.launch.choose_model import LaunchRequest, find_model_problem
from lachesis.launch.resolved_launch import preview_launch
from lachesis.operations.service import LachesisService
from lachesis.prefect_client import background_serve
from lachesis.reporting.run_summary import get_model_name
from lachesis.spending.confirmation import describe_cost

if TYPE_CHECKING:
    from lachesis.runs.record import RunRecord
    from lachesis.supervision.services.plan import ServicePlan


def show_preview(
    args: argparse.Namespace, service: LachesisService, request: LaunchRequest
) -> None:
    """Print the configuration, the processes and the forecast of a launch.

    Raises:
        LachesisError: The launch cannot start with these values.
    """
    preview = preview_launch(request, service.store, service.tests, service.schema_timeout_s)
    config, record, plan = preview.launch.config, preview.record, preview.plan
    # A problem is shown and not raised: the rest of the preview helps to mend it.
    missing_keys = list_missing_keys(request.profile, background_serve.read_key_names())
    problem = find_model_problem(request, config, service.store.home)
    if missing_keys:
        problem = f"{', '.join(missing_keys)} is not known to `lachesis serve`"
    answer = {
        "environment": record.environment,
        "model": record.base_model,
        "profile": record.profile,
        "total_steps": record.total_steps,
        "batch_size": record.batch_size,
        "set_fields": record.set_fields,
        "problem": problem,
        "forecast": record.forecast,
        "prices": config.prices and config.prices.model_dump(mode="json"),
        "services": [
            {"name": spec.name, "port": spec.port, "command": spec.argv} for spec in plan.services
        ],
        "config_yaml": redact(plan.config.to_yaml()),
    }
    print_answer(args, answer, _render_preview(answer, record, plan))


def _render_preview(answer: Json, record: RunRecord, plan: ServicePlan) -> RenderableType:
    set_fields = ", ".join(f"{name}={value}" for name, value in record.set_fields.items())
    problem = answer["problem"]
    facts = make_pairs_table(
        [
            ("environment", record.environment),
            ("model", get_model_name(record)),
            ("profile", record.profile),
            ("steps", f"{record.total_steps} of {record.batch_size} rollouts each"),
            ("begins with", record.forked_from),
            ("set", set_fields),
            ("forecast", _describe_forecast(answer)),
            ("price", _describe_price(answer)),
            ("problem", Text(problem, style="red") if problem else None),
        ]
    )
    # Whole commands are in --json; here the module says what each process is.
    rows = [["process", "port", "what it runs"]]
    for spec in plan.services:
        module = next((word for word in spec.argv if word.startswith("lachesis.")), spec.argv[0])
        rows.append([spec.name, "" if spec.port is None else str(spec.port), module])
    services = make_lines(rows)
    return Group(
        Text("Nothing was started; this would be.\n", style="dim"),
        facts,
        Text(),
        *services,
        Text("\nconfiguration", style="bold"),
        Text(answer["config_yaml"].rstrip(), no_wrap=True, overflow="ignore"),
    )


def _describe_forecast(answer: Json) -> str:
    if answer["forecast"]:
        if PROFILES[answer["profile"]].is_paid:
            return describe_cost(answer["forecast"])
        return f"{format_forecast(answer['forecast'])} ({answer['forecast']['basis']})"
    names = ("environment", "model", "profile", "set_fields")
    command = make_test_command(*(answer[name] for name in names))
    return f"none yet; `{command}` measures what one needs"


def _describe_price(answer: Json) -> str | None:
    prices = answer["prices"]
    if prices:
        return (
            f"{prices['prefill']:g} US dollars per million prompt tokens, {prices['sample']:g} per "
            f"million sampled, {prices['train']:g} per million trained ({prices['dated']})"
        )
    if PROFILES[answer["profile"]].is_paid:
        return "not known for this model"
    return None
