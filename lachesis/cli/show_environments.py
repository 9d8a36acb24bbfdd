"""Format environments and their fields for a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from lachesis.base.json_text import Json
from lachesis.cli.layout import make_lines, make_pairs_table
from lachesis.config.run_fields import EnvSection

if TYPE_CHECKING:
    from lachesis.environment_catalog.scan import ScanResult

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
    last_line = Text("lachesis envs NAME shows the fields of one", style="dim")
    return Group(make_pairs_table(rows), *problems, *clashes, last_line)


def render_environment(launch_description: Json, *, show_all: bool) -> RenderableType:
    """Return the fields of one environment, one line each.

    Args:
        launch_description: What `LachesisService.describe` returns.
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
            Text(f"lachesis envs {name} --all  shows {num_hidden} more fields", style="dim"),
            Text(f"lachesis config {name}      says what is allowed for each", style="dim"),
        ]
    return Group(*parts)


def _is_own(field: Json) -> bool:
    names = COMMON_FIELDS | EnvSection.model_fields.keys()
    return field["section"] == "env" and field["name"] not in names


def _get_key(field: Json) -> str:
    return f"{field['section']}.{field['name']}"


def _render_fields(title: str, fields: list[Json]) -> list[RenderableType]:
    """Return a title and one line per field: its name, its value, and what it is."""
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
