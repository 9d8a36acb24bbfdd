"""Write and read launch files: a training as YAML, with every field and its meaning.

A launch file has the keys `LAUNCH_KEYS` of `LaunchSpec` and its settings in sections. `lachesis
config` writes one, `lachesis train RUN.yaml` starts what it describes. A field whose value is the
default is the same as one that is left out.
"""

import textwrap
from pathlib import Path
from typing import Any

import yaml

from lachesis.base import paths
from lachesis.base.errors import ArgumentsError, ConfigError, StorageError, shorten
from lachesis.base.json_text import Json
from lachesis.config.field_edits import ConfigFields
from lachesis.config.launch_spec import LaunchSpec, read_spec
from lachesis.config.run_config import RunConfig
from lachesis.config.yaml_text import YAML_LOADER, dump_yaml
from lachesis.environment_catalog.lookup import EnvironmentSchema, get_name_or_file
from lachesis.launch.resolve import drop_defaults
from lachesis.runs.record import RunRecord
from lachesis.runs.store import RunStore, read_effective_config
from lachesis.runs.suggested_commands import find_environment

# Columns of the comments in a launch file.
COMMENT_WIDTH = 79
EDITED_SECTIONS = ("env", "tinker", "limits", "rollouts")
# Fields that each run has for itself.
OWN_FIELDS = frozenset({"env.wandb_name"})
# The fields of `LaunchSpec` that a launch file has beside its sections, in their order there.
LAUNCH_KEYS = (
    "environment",
    "profile",
    "model",
    "from_checkpoint",
    "name",
    "note",
    "tags",
    "require_validation",
    "without_validation",
)


def read_launch_file(file: Path, schema_timeout_s: float) -> LaunchSpec:
    """Return the launch that a file describes, with the rights of the owner.

    Raises:
        StorageError: The file cannot be read.
        ConfigError: It is not YAML, or has keys, sections or fields that do not exist; the message
            names the file.
    """
    content = _load(file)
    settings = _pop_section_values(file, content)
    if unknown_keys := content.keys() - set(LAUNCH_KEYS):
        raise ArgumentsError(
            f"{file}: there is no key {shorten(repr(sorted(map(str, unknown_keys))[0]))}; allowed: "
            f"{', '.join((*LAUNCH_KEYS, *EDITED_SECTIONS))}"
        )
    if isinstance(environment := content.get("environment"), str) and environment.endswith(".py"):
        content["environment"] = str(file.parent / Path(environment).expanduser())
    try:
        spec = read_spec(LaunchSpec, {**content, "settings": settings})
        return drop_defaults(spec, paths.home(), schema_timeout_s)
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
    """Return the content of a launch file; raise ConfigError for other content."""
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


def make_similar_spec(
    store: RunStore, record: RunRecord, environment: str | None, schema_timeout_s: float
) -> LaunchSpec:
    """Return a launch with the environment, model and settings of a run.

    Settings that were defaults when the run began, and are no more, are settings too.

    Args:
        store: The runs.
        record: The run.
        environment: Another environment to train on; the fields that only the run's own
            environment has are then left out.
        schema_timeout_s: How long importing the environment may take.

    Raises:
        LachesisError: The run's configuration or its environment cannot be read.
    """
    config = read_effective_config(store.dir(record.run_id))
    own_environment = find_environment(record)
    settings = _list_unlocked_values(config)
    if environment not in (None, own_environment):
        for field in config.env.model_extra or {}:
            settings.pop(f"env.{field}", None)
    spec = record.spec.with_set_fields(settings).model_copy(
        update={
            "environment": environment or own_environment,
            "model": record.base_model,
            "from_checkpoint": record.forked_from,
            "require_validation": record.require_validation,
            "tags": record.tags,
            "name": None,
            "note": None,
            "by_agent": False,
        }
    )
    return drop_defaults(spec, store.home, schema_timeout_s)


def _list_unlocked_values(config: RunConfig) -> Json:
    """Return the values that the owner may set, by SECTION.FIELD, but those of one run alone."""
    fields = ConfigFields(config.profile, is_owner=True).by_name
    values = {
        f"{section}.{field}": value
        for section in EDITED_SECTIONS
        for field, value in getattr(config, section).model_dump(mode="json").items()
    }
    return {
        name: value
        for name, value in values.items()
        if name not in OWN_FIELDS and not (name in fields and fields[name].lock_reason)
    }


def render_launch_file(spec: LaunchSpec, description: Json, defaults: Json) -> str:
    """Return a launch file with every field that can be set, its meaning and its allowed values.

    Args:
        spec: The launch whose values the file has.
        description: What `operations.launches.describe_launch` returns for it.
        defaults: The same for the launch without edits.
    """
    default_values = {
        (field["section"], field["name"]): field["current_value"] for field in defaults["fields"]
    }
    environment = get_name_or_file(description["name"], description["file_path"])
    lines = [
        f"# A training on {description['name']}. Start it with: lachesis train FILE",
        "# A field that is left out has its default.",
        "",
    ]
    keys = {**spec.model_dump(mode="json"), "environment": environment}
    for name in LAUNCH_KEYS:
        meaning = LaunchSpec.model_fields[name].description or ""
        lines += [*_format_comment(meaning, ""), _format_value(name, keys[name]), ""]
    for section in EDITED_SECTIONS:
        lines += [f"{section}:"]
        for field in description["fields"]:
            key = f"{section}.{field['name']}"
            if field["section"] == section and not field["locked"] and key not in OWN_FIELDS:
                lines += _format_field(field, default_values[section, field["name"]])
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def _format_field(field: Json, default_value: Any) -> list[str]:
    """Return the lines of one field: its meaning, its allowed values, and its value."""
    default = _format_value("default", default_value).replace("\n", " ")
    allowed = f"{field['allowed']}; {default}"
    return [
        *_format_comment(field["description"], "  "),
        *_format_comment(allowed, "  "),
        *textwrap.indent(_format_value(field["name"], field["current_value"]), "  ").split("\n"),
    ]


def _format_comment(text: str, indent: str) -> list[str]:
    """Return a text as wrapped lines of comment."""
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
    properties = LaunchSpec.model_json_schema()["properties"]
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
        "properties": {**{name: properties[name] for name in LAUNCH_KEYS}, **sections},
        "$defs": fields.definitions,
    }
