"""Run `env list|show|new|check|install`."""

from __future__ import annotations

import shlex
import shutil
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter
from rich.console import Group, RenderableType
from rich.text import Text

from lachesis.base.json_text import Json
from lachesis.cli import terminal
from lachesis.cli.options import DEFAULT_PROFILE, Edits, EnvironmentName, Output, Profile
from lachesis.cli.terminal import make_lines, make_pairs_table, print_answer
from lachesis.config.launch_spec import LaunchSpec, parse_assignment
from lachesis.config.run_fields import EnvSection
from lachesis.environment_catalog import lookup, new_environment, requirements
from lachesis.operations.environments import (
    CHECK_PREFIX,
    CheckResult,
    remove_old_checks,
    run_environment_checks,
    scan_environments,
)
from lachesis.operations.launches import build_tiny_model, describe_launch, resolve_launch
from lachesis.runs.store import RunStore

if TYPE_CHECKING:
    from lachesis.environment_catalog.scan import ScanResult


_STYLES = {"passed": "green", "warned": "yellow", "failed": "red", "not offered": "dim"}


def list_environments(*, options: Output = Output()) -> None:
    """Print the environments that can be trained on, with what each is about."""
    scan = scan_environments()
    answer = {
        "environments": [asdict(environment) for environment in scan.environments],
        "problems": scan.problems,
        "clashes": scan.clashes,
    }
    print_answer(options, answer, render_environments(scan))


def show_environment(
    environment: EnvironmentName,
    /,
    *,
    show_all: Annotated[
        bool, Parameter("--all", help="show all fields, also those that are locked")
    ] = False,
    profile: Profile = DEFAULT_PROFILE,
    options: Output = Output(),
) -> None:
    """Print an environment with its fields."""
    description = describe_launch(RunStore(), LaunchSpec(environment=environment, profile=profile))
    print_answer(options, description, render_environment(description, show_all=show_all))


def install_requirements(environment: EnvironmentName, /, *, options: Output = Output()) -> None:
    """Install the requirements in the file's header into a folder of their own."""
    selected = lookup.find_environment(lookup.register_environment(environment))
    file = Path(selected.file_path)
    dependencies = requirements.read_requirements(file).dependencies
    if not dependencies:
        terminal.print_answer(
            options, {"requirements": []}, f"{file} declares no requirements (PEP 723)"
        )
        return
    if not options.json:
        terminal.print_note(f"installing {', '.join(dependencies)}")
    folder = requirements.install_requirements(file)
    answer = {"environment": selected.name, "requirements": dependencies, "path": str(folder)}
    terminal.print_answer(
        options,
        answer,
        f"{', '.join(dependencies)} is installed at {folder}, for {selected.name} and other "
        f"environments with the same requirements",
    )


def create_environment(
    name: Annotated[str, Parameter("NAME", help="lower-case letters, digits and _")],
    /,
    *,
    to: Annotated[str, Parameter(metavar="DIR", help="a folder (default: this one)")] = ".",
    options: Output = Output(),
) -> None:
    """Write the file of a new environment, which works as it is."""
    file = new_environment.write_scaffold(name, Path(to).expanduser())
    word = shlex.quote(str(file))
    view = "\n".join(
        [
            f"{file} was created. Next steps:",
            f"  lachesis env check {word}",
            f"  lachesis model build --for {word}     # builds a tiny model pretrained on its "
            f"answer format",
            f"  lachesis test {word}     # uses that model",
            f"  lachesis train {word} --watch",
        ]
    )
    terminal.print_answer(options, {"file": str(file)}, view)


def check_environment(
    environment: EnvironmentName,
    /,
    *,
    model: Annotated[
        str | None, Parameter(help="folder of the model (default: the tiny model)")
    ] = None,
    edits: Edits = (),
    options: Output = Output(),
) -> int:
    """Check an environment and return exit code 1 if a check has failed."""
    store = RunStore()
    settings = dict(parse_assignment(text) for text in edits)
    spec = LaunchSpec(environment=environment, model=model, settings=settings)
    resolved = resolve_launch(store, spec)
    checked, config = resolved.environment, resolved.config
    with terminal.show_progress_bar("building the tiny model", quiet=options.json) as advance:
        build_tiny_model(store, config, advance)
    remove_old_checks()
    folder = Path(tempfile.mkdtemp(prefix=f"{CHECK_PREFIX}{checked.name}-"))
    report_line = (lambda line: None) if options.json else _print_line
    try:
        lines = run_environment_checks(checked, config, folder, report_line)
    except KeyboardInterrupt:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    has_failed = any(line.status == "failed" for line in lines)
    answer = {
        "environment": checked.name,
        "file_path": checked.file_path,
        "ok": not has_failed,
        "logs": str(folder) if has_failed else None,
    }
    if not has_failed:
        shutil.rmtree(folder, ignore_errors=True)
    outcome = f"has failed; logs: {folder}" if has_failed else "passed every check"
    summary = f"{checked.name} {outcome}"
    terminal.print_answer(options, {**answer, "checks": [asdict(line) for line in lines]}, summary)
    return int(has_failed)


def _print_line(line: CheckResult) -> None:
    mark = Text(f"{line.status:12}", style=_STYLES[line.status])
    terminal.print_sentence(mark + Text(f"{line.name:17} {line.message}", style=""))


# The fields that a first run may want to change, beside the environment's own.
MAIN_FIELDS = (
    "env.total_steps",
    "env.group_size",
    "env.batch_size",
    "env.max_token_length",
    "env.steps_per_eval",
    "tinker.learning_rate",
    "tinker.lora_rank",
    "tinker.loss_fn",
    "tinker.kl_coefficient",
    "tinker.seed",
    "limits.max_hours",
    "limits.max_tokens",
)
# Fields that Atropos gives every environment, of which few users change one.
COMMON_FIELDS = frozenset(
    [
        "max_eval_workers",
        "max_num_workers_per_node",
        "eval_handling",
        "num_rollouts_to_keep",
        "num_rollouts_per_group_for_logging",
        "data_path_to_save_groups",
        "min_items_sent_before_logging",
        "include_messages",
        "thinking_mode",
        "reasoning_effort",
        "max_reasoning_tokens",
        "custom_thinking_prompt",
    ]
)
MAX_VALUE_WIDTH = 18


def render_environments(scan: ScanResult) -> RenderableType:
    """Return the environments with their files, and the files that could not be read."""
    rows = [
        (environment.name, Text(environment.description).append(f"\n{path}", style="dim"))
        for environment in scan.environments
        for path in [environment.file_path]
    ]
    problems = [
        Text(f"{file} cannot be read: {reason}", style="red")
        for file, reason in scan.problems.items()
    ]
    clashes = [Text(f"{name} is {reason}", style="yellow") for name, reason in scan.clashes.items()]
    last_line = Text("lachesis env show NAME shows the fields of one", style="dim")
    return Group(make_pairs_table(rows), *problems, *clashes, last_line)


def render_environment(launch_description: Json, *, show_all: bool) -> RenderableType:
    """Return the fields of one environment, one line each.

    Args:
        launch_description: What `describe_launch` returns.
        show_all: Whether all fields are shown, those that are locked too.
    """
    editable = [field for field in launch_description["fields"] if not field["locked"]]
    own = [field for field in editable if _is_own(field)]
    others = [field for field in editable if not _is_own(field)]
    main = [field for field in others if _get_key(field) in MAIN_FIELDS]
    name = launch_description["name"]
    head = f"{name} ({launch_description['class_name']}): {launch_description['description']}"
    parts: list[RenderableType] = [Text(head), Text(launch_description["file_path"], style="dim")]
    if launch_description["warning"]:
        parts.append(Text(launch_description["warning"], style="yellow"))
    parts += _render_fields("of this environment", own)
    parts += _render_fields("of the training", others if show_all else main)
    if show_all:
        parts += _render_locked(launch_description["fields"])
    else:
        num_hidden = len(launch_description["fields"]) - len(own) - len(main)
        parts += [
            Text(),
            Text(f"lachesis env show {name} --all  shows {num_hidden} more fields", style="dim"),
            Text(f"lachesis config {name}      says what is allowed for each", style="dim"),
        ]
    return Group(*parts)


def _is_own(field: Json) -> bool:
    names = COMMON_FIELDS | EnvSection.model_fields.keys()
    return field["section"] == "env" and field["name"] not in names


def _get_key(field: Json) -> str:
    return f"{field['section']}.{field['name']}"


def _render_fields(title: str, fields: list[Json]) -> list[RenderableType]:
    """Return a title and a line per field: its name, value and description."""
    if not fields:
        return []
    rows = [
        [_get_key(field), _format_value(field["current_value"]), field["description"]]
        for field in fields
    ]
    return [Text(f"\nfields {title}", style="bold"), *make_lines(rows)]


def _render_locked(fields: list[Json]) -> list[RenderableType]:
    rows = [
        [_get_key(field), _format_value(field["current_value"]), field["locked"]]
        for field in fields
        if field["locked"]
    ]
    return [Text("\nlocked fields", style="bold"), *make_lines(rows)] if rows else []


def _format_value(value: object) -> str:
    text = str(value)
    if len(text) > MAX_VALUE_WIDTH:
        return f"{text[: MAX_VALUE_WIDTH - 1]}…"
    return text
