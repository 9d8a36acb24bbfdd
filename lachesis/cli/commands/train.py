"""Run `train`, `resume` and `config`: read a launch, check it, start the run, and follow it."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter
from rich.console import Group, RenderableType
from rich.text import Text

from lachesis.base.errors import ArgumentsError
from lachesis.base.formatting import show_controls
from lachesis.base.json_text import Json
from lachesis.base.secrets import redact
from lachesis.checkpoints.manifests import Checkpoints
from lachesis.cli import terminal
from lachesis.cli.commands import run_status, watch
from lachesis.cli.options import (
    DEFAULT_PROFILE,
    FollowOptions,
    LaunchOptions,
    Output,
    Run,
    StartFrom,
    options_class,
)
from lachesis.cli.terminal import make_lines, make_pairs_table, print_answer
from lachesis.config.launch_spec import LaunchSpec, parse_assignment, read_spec
from lachesis.config.profiles import PROFILES, load_profile_values
from lachesis.config.run_config import RunConfig
from lachesis.config.value_parsing import read_untyped
from lachesis.environment_catalog.lookup import find_environment, load_schema, register_environment
from lachesis.operations.launches import (
    ResolvedLaunch,
    build_tiny_model,
    check_launch,
    describe_default_model,
    describe_launch,
    find_forecast,
    make_launch_schema,
    make_similar_spec,
    preview_launch,
    read_launch_file,
    render_launch_file,
    start_run,
)
from lachesis.operations.runs import get_run, get_run_url, resume_run, view_run
from lachesis.operations.server import call_with_server
from lachesis.reporting.run_schemas import build_run_results
from lachesis.reporting.run_summary import get_model_name
from lachesis.reporting.run_view import Forecast, describe_forecast
from lachesis.runs.record import RunRecord
from lachesis.runs.store import RunStore
from lachesis.runs.suggested_commands import format_test
from lachesis.spending.confirmation import describe_cost, needs_confirmation

if TYPE_CHECKING:
    from lachesis.operations.launches import ServicePlan


@options_class
class TrainOptions(LaunchOptions, FollowOptions):
    """Options of `lachesis train`."""

    others: Annotated[
        tuple[str, ...],
        Parameter(
            "--with",
            metavar="ENVIRONMENT[=WEIGHT]",
            help="another environment for the same run, with its weight relative to the first "
            "one's 1; may be repeated",
        ),
    ] = ()
    start_from: StartFrom = None
    dry_run: Annotated[
        bool,
        Parameter(help="show the configuration, the processes and the forecast; start nothing"),
    ] = False
    yes: Annotated[
        bool,
        Parameter(
            help="on a paid profile, start without asking (a limit of limits.max_cost_usd does so "
            "too)"
        ),
    ] = False


@options_class
class ConfigOptions(LaunchOptions, Output):
    """Options of `lachesis config`."""

    schema: Annotated[
        bool, Parameter(help="write the JSON schema of launch files instead, for editors")
    ] = False


LaunchedEnvironment = Annotated[
    str | None,
    Parameter(
        "ENVIRONMENT", help="a name from `lachesis env list`, a file, or a launch file RUN.yaml"
    ),
]


def train(
    environment: LaunchedEnvironment = None, /, *, options: TrainOptions = TrainOptions()
) -> int:
    """Check a launch, start the run, and with `--watch` show its progress."""
    store = RunStore()
    spec = read_launch_spec(environment, options, store)
    if options.dry_run:
        show_preview(options, store, spec)
        return 0
    resolved = call_with_server(
        lambda: check_launch(store, spec),
        terminal.print_note,
        is_forbidden=options.no_serve,
        home=store.home,
    )
    show_warnings(resolved)
    prepare_model(options, store, resolved)
    confirmed = confirm_cost(options, store, resolved)
    if confirmed is None:
        print_answer(options, {"started": False}, "nothing was started")
        return 1
    return _follow_run(options, store, start_run(store, confirmed))


def confirm_cost(
    options: TrainOptions, store: RunStore, launch: ResolvedLaunch
) -> ResolvedLaunch | None:
    """Return the launch with its user's agreement to the cost, or None if the user declines.

    A free launch, and one whose money is limited, is returned as it is. Where nobody can answer, an
    unconfirmed one is refused when it is started.
    """
    spec = launch.spec
    if not needs_confirmation(spec.profile, spec.list_edits()):
        return launch
    forecast = find_forecast(store, launch)
    if not options.yes:
        # Nobody can answer, so the start itself refuses, with the forecast.
        if options.json or not sys.stdin.isatty():
            return launch
        terminal.print_note(f"{launch.environment.name} on profile {spec.profile}:")
        for sentence in describe_cost(forecast).split("; "):
            terminal.print_note(f"  {sentence}")
        if input("Start this run? [y/N] ").strip().lower() not in ("y", "yes"):
            return None
    return replace(launch, confirmed=True)


def show_warnings(launch: ResolvedLaunch) -> None:
    """Print the warnings of a launch for the owner of the installation."""
    for warning in launch.warnings:
        terminal.print_note(f"note: {warning}")


def prepare_model(options: Output, store: RunStore, launch: ResolvedLaunch) -> None:
    """Build the tiny model if the launch needs it, and show the progress."""
    config = launch.config
    if model_note := describe_default_model(launch.spec, config.openai.model_name):
        terminal.print_note(model_note)
    with terminal.show_progress_bar("building the tiny model", quiet=options.json) as advance:
        build_tiny_model(store, config, advance)


def resume(
    run: Run,
    /,
    *,
    edits: Annotated[
        tuple[str, ...],
        Parameter(
            "--set",
            metavar="total_steps=N|limits.FIELD=VALUE",
            help="more steps, or a new limit; may be repeated",
        ),
    ] = (),
    options: FollowOptions = FollowOptions(),
) -> int:
    """Continue an ended run, with new limits or more steps if there are any."""
    store = RunStore()
    if not get_run(store, run).has_ended:
        terminal.print_note(f"run {run} has not ended, so nothing was started")
    changes = dict(parse_assignment(text) for text in edits)
    record = call_with_server(
        lambda: resume_run(store, run, changes, by_owner=True),
        terminal.print_note,
        is_forbidden=options.no_serve,
    )
    return _follow_run(options, store, record)


def _follow_run(options: FollowOptions, store: RunStore, record: RunRecord) -> int:
    """Show that the run was started; with --watch, show its progress until it ends."""
    if options.watch:
        with watch.explain_interrupt([record.run_id]):
            record = watch.watch_until_end(store, record.run_id, quiet=options.json)
        view = view_run(store, record.run_id)
        print_answer(options, build_run_results(view).to_payload(), run_status.render_results(view))
        if record.status == "completed":
            return 0
        return 1
    newest_checkpoint = Checkpoints(store.dir(record.run_id).checkpoints).find_newest()
    answer = {
        "run_id": record.run_id,
        "status": record.status,
        "phase": record.phase,
        "environment": record.environment,
        "model": record.base_model,
        "begins_with": record.forked_from
        or (f"the checkpoint of step {newest_checkpoint.step}" if newest_checkpoint else None),
        "config_path": str(store.dir(record.run_id).config),
        "ui_url": get_run_url(record),
    }
    print_answer(options, answer, run_status.render_started(answer))
    return 0


LAUNCH_FILE_ENDINGS = (".yaml", ".yml")


def read_launch_spec(
    environment: str | None, options: TrainOptions | ConfigOptions, store: RunStore
) -> LaunchSpec:
    """Return the launch that the options describe, with the rights of the owner.

    Options have priority over a launch file and over the run of `--like`.

    Raises:
        ArgumentsError: Nothing says what to train on.
        LachesisError: The launch file, the run or a value cannot be used.
    """
    base = _read_base(environment, options, store)
    settings: Json = dict(parse_assignment(text) for text in options.edits)
    values = {
        "profile": options.profile,
        "steps": options.steps,
        "model": options.model,
        "name": options.name,
        "note": options.note,
        "tags": [*base.tags, *options.tag],
        "seed": options.seed,
        "require_validation": options.require_validation or base.require_validation,
        "without_validation": options.without_validation or base.without_validation,
    }
    if isinstance(options, TrainOptions):
        values["from_checkpoint"] = options.start_from
        if options.others:
            settings["env.mixture"] = dict(map(_parse_mixture_item, options.others))
    given = {name: value for name, value in values.items() if value is not None}
    return read_spec(
        LaunchSpec, {**base.model_dump(), **given, "settings": {**base.settings, **settings}}
    )


def _read_base(environment: str | None, options: LaunchOptions, store: RunStore) -> LaunchSpec:
    """Return the launch of the file or of the run that was named, or that of the environment."""
    if options.like:
        record = get_run(store, options.like)
        return make_similar_spec(store, record, environment)
    if not environment:
        raise ArgumentsError(
            "nothing says what to train on; give an environment from `lachesis env list`, a launch "
            "file, or --like RUN"
        )
    if environment.endswith(LAUNCH_FILE_ENDINGS):
        return read_launch_file(Path(environment).expanduser())
    return LaunchSpec(environment=environment, profile=options.profile or DEFAULT_PROFILE)


def _parse_mixture_item(text: str) -> tuple[str, dict[str, Any]]:
    """Parse ENVIRONMENT or ENVIRONMENT=WEIGHT."""
    name, weight = parse_assignment(text if "=" in text else f"{text}=1")
    return register_environment(name), {"weight": read_untyped(weight)}


def config(
    environment: LaunchedEnvironment = None, /, *, options: ConfigOptions = ConfigOptions()
) -> None:
    """Print a launch file; with --schema the JSON schema."""
    store = RunStore()
    if options.schema:
        _print_schema(environment, options.profile or DEFAULT_PROFILE)
        return
    spec = read_launch_spec(environment, options, store)
    description = describe_launch(store, spec)
    if options.json:
        print(json.dumps(description, indent=2, default=str))
    else:
        # The defaults are those of the profile, not those of the schema.
        defaults = describe_launch(store, spec.with_set_fields({}))
        print(show_controls(render_launch_file(spec, description, defaults)), end="")


def _print_schema(environment: str | None, profile: str) -> None:
    load_profile_values(profile)  # refuses an unknown profile
    schema = None
    if environment:
        schema = load_schema(find_environment(register_environment(environment)))
    print(json.dumps(make_launch_schema(profile, schema), indent=2, default=str))


def show_preview(options: Output, store: RunStore, spec: LaunchSpec) -> None:
    """Print the configuration, the processes and the forecast of a launch.

    Raises:
        LachesisError: The launch cannot start with these values.
    """
    preview = preview_launch(store, spec)
    config, record, plan = preview.launch.config, preview.record, preview.plan
    answer = {
        "environment": record.environment,
        "model": record.base_model,
        "profile": record.profile,
        "total_steps": record.total_steps,
        "batch_size": record.batch_size,
        "set_fields": record.set_fields,
        "problem": preview.problem,
        "forecast": record.forecast,
        "prices": config.prices and config.prices.model_dump(mode="json"),
        "services": [
            {"name": spec.name, "port": spec.port, "command": spec.argv} for spec in plan.services
        ],
        "config_yaml": redact(plan.config.to_yaml()),
    }
    print_answer(options, answer, _render_preview(answer, record, plan))


def _render_preview(answer: Json, record: RunRecord, plan: ServicePlan) -> RenderableType:
    """Return a launch that was not started: its facts, processes and cost."""
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
            ("forecast", _describe_forecast(answer, record)),
            ("price", _describe_price(plan.config)),
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
        Text("Nothing was started. This is what would run:\n", style="dim"),
        facts,
        Text(),
        *services,
        Text("\nconfiguration", style="bold"),
        Text(answer["config_yaml"].rstrip(), no_wrap=True, overflow="ignore"),
    )


def _describe_forecast(answer: Json, record: RunRecord) -> str:
    if answer["forecast"]:
        if PROFILES[answer["profile"]].is_paid:
            return describe_cost(answer["forecast"])
        forecast = Forecast(**answer["forecast"])
        return f"{describe_forecast(forecast)} ({forecast.basis})"
    return f"none yet; run `{format_test(record)}` to make one"


def _describe_price(config: RunConfig) -> str | None:
    """Return the prices of the model in words; None where nothing is paid."""
    if config.prices:
        return config.prices.describe()
    return "not known for this model" if PROFILES[config.profile].is_paid else None
