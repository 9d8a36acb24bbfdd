"""Write and read launch files: a training as YAML, with every field and its meaning.

A launch file has the keys of `LaunchKeys` and a section for each of `EDITED_SECTIONS`. `lachesis
config` writes one, `lachesis train RUN.yaml` starts what it describes. A field whose value is the
default is the same as one that is left out.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from lachesis.base.errors import ConfigError, FieldValueError, StorageError, shorten
from lachesis.base.json_text import Json
from lachesis.config.field_edits import ConfigFields
from lachesis.config.profiles import PROFILES
from lachesis.config.run_config import RunConfig, format_validation_error
from lachesis.config.yaml_text import YAML_LOADER, dump_yaml
from lachesis.environment_catalog.lookup import (
    EnvironmentSchema,
    get_name_or_file,
    register_environment,
)
from lachesis.launch.choose_model import LaunchRequest
from lachesis.launch.resolved_launch import LaunchFields, read_launch_fields
from lachesis.runs.names_and_tags import MAX_NAME_LENGTH, MAX_NOTE_LENGTH, TAG_PATTERN
from lachesis.runs.record import RunRecord
from lachesis.runs.store import RunStore

# Columns of the comments in a launch file.
COMMENT_WIDTH = 79
EDITED_SECTIONS = ("env", "tinker", "limits", "rollouts")
# Fields that each run has for itself.
OWN_FIELDS = frozenset({"env.wandb_name"})


class LaunchKeys(BaseModel):
    """The keys of a launch file beside its sections."""

    model_config = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True)

    environment: str = Field(min_length=1)
    """What is trained on: a name from `lachesis env list`, or a file, relative to this one."""
    profile: str = Field("embedded", json_schema_extra={"enum": [*sorted(PROFILES)]})
    """Where training happens."""
    model: str | None = None
    """Base model: a Hugging Face name, a folder or tiny; null is the profile's own."""
    start_from: str | None = None
    """Checkpoint whose weights the run begins with: RUN, RUN@STEP or RUN@best."""
    name: str | None = Field(None, max_length=MAX_NAME_LENGTH)
    """A name, which lists and the run's page show."""
    note: str | None = Field(None, max_length=MAX_NOTE_LENGTH)
    """What you want to remember about the run."""
    tags: list[str] = Field([], json_schema_extra={"items": {"pattern": f"^{TAG_PATTERN}$"}})
    """Words to find the run by."""
    require_validation: bool = False
    """Refuse unless a recent `lachesis test` found the environment learnable."""
    without_validation: bool = False
    """Do not require such a test on a paid profile."""


def read_launch_file(file: Path, schema_timeout_s: float) -> LaunchRequest:
    """Return the launch that a file describes, with the rights of the owner.

    Raises:
        StorageError: The file cannot be read.
        ConfigError: It is not YAML, or has keys, sections or fields that do not exist; the message
            names the file.
    """
    content = _load(file)
    values = _pop_section_values(file, content)
    try:
        keys = LaunchKeys.model_validate(content)
    except ValidationError as error:
        raise FieldValueError(
            f"{file}: {format_validation_error(error)}; allowed keys: "
            f"{', '.join([*LaunchKeys.model_fields, *EDITED_SECTIONS])}"
        ) from error
    request = LaunchRequest(
        environment=_find_environment(keys.environment, file),
        profile=keys.profile,
        model=keys.model,
        start_from=keys.start_from,
        require_validation=keys.require_validation,
        without_validation=keys.without_validation,
        by_owner=True,
        name=keys.name,
        note=keys.note,
        tags=tuple(keys.tags),
    )
    try:
        return keep_changed_values(request, values, schema_timeout_s)
    except ConfigError as error:
        raise type(error)(f"{file}: {error}", **error.details) from error


def _pop_section_values(file: Path, content: Json) -> Json:
    """Take the sections out of a file's content, and return their values by SECTION.FIELD."""
    values: Json = {}
    for section in EDITED_SECTIONS:
        fields = content.pop(section, None) or {}
        if not isinstance(fields, dict):
            raise ConfigError(f"{file}: {section} is {shorten(repr(fields))}; allowed: fields")
        values |= {f"{section}.{field}": value for field, value in fields.items()}
    return values


def _load(file: Path) -> Json:
    try:
        content = yaml.load(file.read_text(encoding="utf-8"), Loader=YAML_LOADER)
    except OSError as error:
        raise StorageError(f"{file} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        problem = " ".join(str(error).split())
        raise ConfigError(f"{file} is not YAML: {problem}") from error
    if not isinstance(content, dict):
        raise ConfigError(
            f"{file} describes no launch; `lachesis config ENV > RUN.yaml` writes one that does"
        )
    if "lachesis" in content:
        raise ConfigError(
            f"{file} is the configuration of a run; `lachesis train --like RUN` begins another one "
            "like it"
        )
    return content


def _find_environment(text: str, file: Path) -> str:
    """Return the name of the environment, whose file is relative to the launch file."""
    if text.endswith(".py"):
        return register_environment(str(file.parent / Path(text).expanduser()))
    return register_environment(text)


def make_similar_request(
    store: RunStore, record: RunRecord, environment: str | None, schema_timeout_s: float
) -> LaunchRequest:
    """Return a launch with the environment, model and settings of a run.

    Args:
        store: The runs.
        record: The run.
        environment: Another environment to train on; the fields that only the run's own
            environment has are then left out.
        schema_timeout_s: How long importing the environment may take.

    Raises:
        LachesisError: The run's configuration or its environment cannot be read.
    """
    config = RunConfig.from_yaml(store.dir(record.run_id).config)
    own_environment = record.environment
    # A file that was moved since is found by the environment's name, if it is found at all.
    if Path(record.environment_file).is_file():
        own_environment = register_environment(
            get_name_or_file(record.environment, record.environment_file)
        )
    request = LaunchRequest(
        environment=environment or own_environment,
        profile=record.profile,
        model=record.base_model,
        start_from=record.forked_from,
        require_validation=record.require_validation,
        by_owner=True,
        tags=tuple(record.tags),
    )
    values = {
        f"{name}.{field}": value
        for name in EDITED_SECTIONS
        for field, value in getattr(config, name).model_dump().items()
    }
    if environment not in (None, own_environment):
        for field in config.env.model_extra or {}:
            values.pop(f"env.{field}")
    return keep_changed_values(request, values, schema_timeout_s, skip_locked=True)


def keep_changed_values(
    request: LaunchRequest,
    values: Mapping[str, Any],
    schema_timeout_s: float,
    *,
    skip_locked: bool = False,
) -> LaunchRequest:
    """Return the launch with those of the values, by SECTION.FIELD, that are not the defaults.

    Args:
        request: The launch without these values.
        values: Values by SECTION.FIELD.
        schema_timeout_s: How long importing the environment may take.
        skip_locked: Whether values of locked and of unknown fields are left out rather than
            refused.

    Raises:
        UnknownFieldError: There is no such field.
        LockedFieldError: A locked field has another value than its own.
    """
    launch_fields = read_launch_fields(request, schema_timeout_s)
    defaults = _read_defaults(launch_fields)
    # Only what is set counts as chosen by the user: `status` and a later `--like` show it.
    edits: list[tuple[str, Any]] = []
    for key, value in values.items():
        if skip_locked:
            field = launch_fields.fields.by_name.get(key)
            if field is None or field.lock_reason is not None or key in OWN_FIELDS:
                continue
        field = launch_fields.fields.find(key)
        if value != defaults[field.section].get(field.name):
            edits.append((key, value))
    return replace(request, edits=(*edits, *request.edits))


def _read_defaults(launch_fields: LaunchFields) -> Json:
    """Return the values that the launch has without edits, by section and field."""
    home = RunStore().home
    return launch_fields.build_config(home, with_edits=False).model_dump()


def render_launch_file(request: LaunchRequest, description: Json, defaults: Json) -> str:
    """Return a launch file with every field that can be set, its meaning and what is allowed.

    Args:
        request: The launch whose values the file has.
        description: What `LachesisService.describe` returns for it.
        defaults: The same for the launch without edits.
    """
    default_values = {
        (field["section"], field["name"]): field["current_value"] for field in defaults["fields"]
    }
    environment = get_name_or_file(request.environment, description["file_path"])
    lines = [
        f"# A training on {description['name']}. Start it with: lachesis train FILE",
        "# A field that is left out has its default.",
        "",
    ]
    keys: Json = {"environment": environment, "tags": list(request.tags)}
    for name, info in LaunchKeys.model_fields.items():
        # The other keys have the names of the request's fields.
        value = keys.get(name, getattr(request, name, info.default))
        lines += [*_format_comment(info.description or "", ""), _format_value(name, value), ""]
    for section in EDITED_SECTIONS:
        lines += [f"{section}:"]
        for field in description["fields"]:
            key = f"{section}.{field['name']}"
            if field["section"] == section and not field["locked"] and key not in OWN_FIELDS:
                lines += _format_field(field, default_values[section, field["name"]])
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def _format_field(field: Json, default_value: Any) -> list[str]:
    """Return the lines of one field: what it is, what is allowed, and its value."""
    default = _format_value("default", default_value).replace("\n", " ")
    allowed = f"{field['allowed']}; {default}"
    return [
        *_format_comment(field["description"], "  "),
        *_format_comment(allowed, "  "),
        *textwrap.indent(_format_value(field["name"], field["current_value"]), "  ").split("\n"),
    ]


def _format_comment(text: str, indent: str) -> list[str]:
    return textwrap.wrap(
        " ".join(text.split()),
        COMMENT_WIDTH,
        initial_indent=f"{indent}# ",
        subsequent_indent=f"{indent}# ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def _format_value(name: str, value: Any) -> str:
    return dump_yaml({name: value}).rstrip("\n")


def make_launch_schema(profile: str, schema: EnvironmentSchema | None = None) -> Json:
    """Return the JSON schema of launch files, for editors.

    Args:
        profile: The profile, which says which fields are locked.
        schema: The environment whose own fields are allowed too; without one, any field is allowed
            in `env`.
    """
    fields = ConfigFields(profile, schema, is_owner=True)
    top = LaunchKeys.model_json_schema()
    sections: dict[str, Json] = {
        name: {"type": "object", "properties": {}, "additionalProperties": False}
        for name in EDITED_SECTIONS
    }
    for field in fields.by_name.values():
        if field.section in sections and not field.lock_reason:
            sections[field.section]["properties"][field.name] = {
                "description": field.description,
                **field.schema,
            }
    if schema is None:
        sections["env"]["additionalProperties"] = True
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A training of Lachesis",
        "type": "object",
        "additionalProperties": False,
        "required": ["environment"],
        "properties": {**top["properties"], **sections},
        "$defs": fields.definitions,
    }
