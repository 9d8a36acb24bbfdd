"""Present the fields of an environment to a person or an agent, and check their edits.

A field is named alone (`group_size`) or with its section (`tinker.learning_rate`). A name that
occurs in several sections means the field that can be edited, `env` before `tinker`. The
environment's own fields come from its configuration class.
"""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jsonschema
from pydantic import ValidationError

from lachesis.base.errors import (
    ConfigError,
    FieldValueError,
    LockedFieldError,
    UnknownFieldError,
    shorten,
)
from lachesis.base.formatting import suggest
from lachesis.base.json_text import Json
from lachesis.config.launch_spec import STEPS_FIELD
from lachesis.config.locked_fields import INFRASTRUCTURE, find_lock
from lachesis.config.owner_policy import LOCK_REASON, AgentPolicy, load_policy
from lachesis.config.run_config import RunConfig, build_run_config, check_cost_limit
from lachesis.config.run_fields import (
    EnvSection,
    LimitsSection,
    OpenAISection,
    RolloutsSection,
    Section,
    TinkerSection,
)
from lachesis.config.value_parsing import describe_allowed, read_typed_value
from lachesis.environment_catalog.lookup import EnvironmentSchema

SECTIONS: dict[str, type[Section]] = {
    "env": EnvSection,
    "tinker": TinkerSection,
    "openai": OpenAISection,
    "limits": LimitsSection,
    "rollouts": RolloutsSection,
}
# The section of fields that belong to no section of the YAML.
TOP_SECTION = "run"
MAX_CHARACTERS = 10_000


@dataclass(frozen=True)
class ConfigField:
    """Describe one field; `lock_reason` says why it cannot be changed in this profile, or is
    None, and `agent_lock_reason` why agents cannot change it.
    """

    section: str
    name: str
    schema: dict[str, Any]
    default: Any
    description: str
    lock_reason: str | None
    agent_lock_reason: str | None = None

    @property
    def type(self) -> str:
        """Return the type of the field in words, such as `integer | null`."""
        kinds = self.schema.get("anyOf") or self.schema.get("oneOf") or [self.schema]
        words = []
        for kind in kinds:
            if "enum" in kind or "const" in kind:
                words.append(" | ".join(map(str, kind.get("enum", [kind.get("const")]))))
            else:
                words.append(str(kind.get("type") or kind.get("$ref", "any").rsplit("/", 1)[-1]))
        return " | ".join(words)


@functools.cache
def _make_section_schema(model: type[Section]) -> dict[str, Any]:
    """Return the JSON schema of a section, which takes pydantic a while. It is never changed."""
    return model.model_json_schema()


class ConfigFields:
    """Hold all fields of one environment under one profile.

    With `is_owner` the fields that are locked for agents only can be edited; an agent can edit what
    the owner's policy leaves to it.
    """

    def __init__(
        self, profile: str, schema: EnvironmentSchema | None = None, *, is_owner: bool = False
    ) -> None:
        self.policy = AgentPolicy() if is_owner else load_policy()
        self.definitions: dict[str, Any] = {}
        self.by_name: dict[str, ConfigField] = {}
        # The environment's schema, which may be narrower than ours for fields of both.
        self.environment_properties: dict[str, Any] = {}
        for section, model in SECTIONS.items():
            section_schema = _make_section_schema(model)
            self.definitions.update(section_schema.get("$defs", {}))
            for name, info in model.model_fields.items():
                lock = find_lock(f"{section}.{name}", profile)
                agent_lock_reason = lock_reason = lock.reason if lock else None
                if lock and lock.for_agents:
                    if is_owner or self.policy.allows_field(section, name):
                        lock_reason = None
                elif not lock and self.policy.locks_field(section, name):
                    lock_reason = LOCK_REASON
                field = ConfigField(
                    section,
                    name,
                    section_schema["properties"][name],
                    info.default,
                    info.description or "",
                    lock_reason,
                    agent_lock_reason,
                )
                self.by_name[f"{section}.{name}"] = field
        for name in ("slurm", "testing"):
            info = RunConfig.model_fields[name]
            field_schema = {"type": "boolean", "enum": [False]}
            field = ConfigField(
                TOP_SECTION,
                name,
                field_schema,
                False,
                info.description or "",
                INFRASTRUCTURE.reason,
            )
            self.by_name[f"{TOP_SECTION}.{name}"] = field
        if schema is not None:
            self._add_own(schema)

    def _add_own(self, schema: EnvironmentSchema) -> None:
        """Add the environment's own fields, and the definitions that their types refer to."""
        self.definitions.update(schema.definitions)
        self.environment_properties = schema.properties
        for name, property_schema in schema.properties.items():
            reference = str(property_schema.get("$ref", "")).rsplit("/", 1)[-1]
            property_schema = {
                **self.definitions.get(reference, {}),
                **{key: value for key, value in property_schema.items() if key != "$ref"},
            }
            if f"env.{name}" not in self.by_name:
                default = schema.values.get(name)
                self.by_name[f"env.{name}"] = ConfigField(
                    "env",
                    name,
                    property_schema,
                    default,
                    property_schema.get("description", ""),
                    LOCK_REASON if self.policy.locks_field("env", name) else None,
                )

    def find(self, name: str) -> ConfigField:
        """Return the field of this name.

        Raises:
            UnknownFieldError: There is none; the message lists the fields that can be edited.
        """
        names = (name, *(f"{section}.{name}" for section in (*SECTIONS, TOP_SECTION)))
        matches = [self.by_name[full_name] for full_name in names if full_name in self.by_name]
        if matches:
            return next((field for field in matches if field.lock_reason is None), matches[0])
        available = [field.name for field in self.by_name.values() if field.lock_reason is None]
        suggestion = suggest(name.rpartition(".")[2], available)
        raise UnknownFieldError(
            f"there is no field {shorten(repr(name))}{suggestion}; fields that can be edited: "
            f"{', '.join(available)}",
            available_fields=available,
        )

    def check_edit(
        self, name: str, value: object, current: RunConfig | None = None
    ) -> tuple[ConfigField, Any]:
        """Return the field of this name and the checked value for it.

        Raises:
            UnknownFieldError: There is no such field.
            LockedFieldError: The profile locks the field.
            FieldValueError: The value has the wrong type or is out of range.
        """
        field = self.find(name)
        if field.lock_reason is not None:
            if field.section == TOP_SECTION:
                section = current
            else:
                section = getattr(current, field.section, None)
            current_value = getattr(section, field.name, field.default)
            raise LockedFieldError(
                f"{field.section}.{field.name} is locked at {current_value!r} "
                f"({field.lock_reason}); rl_get_current_config or `lachesis env show NAME` shows "
                "what can be edited",
                locked_value=current_value,
            )
        return field, self._check_value(field, value)

    def parse_value(self, field: ConfigField, value: object) -> Any:
        """Convert a string to the type of the field, unchecked; see `typed_values`."""
        schema = field.schema
        if field.section == "env":  # The environment may allow less than we do for its fields.
            schema = self.environment_properties.get(field.name, schema)
        return read_typed_value(schema, value, self.definitions)

    def _check_value(self, field: ConfigField, value: Any) -> Any:
        """Return the value as its field takes it; raise FieldValueError with the allowed values."""
        try:
            value = self.parse_value(field, value)
            _reject_unusable_value(value)
            jsonschema.validate(value, {**field.schema, "$defs": self.definitions})
            if field.section == "env":
                jsonschema.validate(
                    value,
                    {**self.environment_properties.get(field.name, {}), "$defs": self.definitions},
                )
            model = SECTIONS[field.section]
            if field.name in model.model_fields:
                return getattr(model.model_validate({field.name: value}), field.name)
        except (jsonschema.ValidationError, ValidationError, ValueError) as error:
            if isinstance(error, ValidationError):
                reason = error.errors()[0]["msg"]
            else:
                reason = getattr(error, "message", str(error))
            shown = shorten(repr(value))
            raise FieldValueError(
                f"{field.section}.{field.name} is {shown}: "
                f"{shorten(reason.removeprefix('Value error, '))}; allowed: "
                f"{describe_allowed(field.schema)}"
            ) from error
        if field.schema.get("type") == "integer":
            return int(value)  # JSON does not distinguish 8.0 from 8.
        return value


def get_editable_values(config: RunConfig) -> dict[str, Any]:
    """Return the values of the fields that the configuration's profile does not lock."""
    unlocked_fields = [
        field
        for field in ConfigFields(config.profile).by_name.values()
        if field.lock_reason is None
    ]
    values = {
        field.name: getattr(getattr(config, field.section), field.name) for field in unlocked_fields
    }
    return {**values, **(config.env.model_extra or {})}


def replace_resumed_values(
    config: RunConfig, changes: Json, hint: str = "", *, is_owner: bool = False
) -> RunConfig:
    """Return the configuration of a run that is resumed with more steps or other limits.

    With `is_owner` the fields that are locked for agents only can be changed.

    Raises:
        ConfigError: A field is neither `env.total_steps` nor a limit (the message ends with
            `hint`), or a value is not allowed.
    """
    limits = dict(changes)
    steps = [limits.pop(name) for name in (STEPS_FIELD, "total_steps") if name in limits]
    if limits:
        config = replace_limits(config, limits, hint, is_owner=is_owner)
    if not steps:
        return config
    fields = ConfigFields(config.profile, is_owner=is_owner)
    _, total_steps = fields.check_edit(STEPS_FIELD, steps[0], config)
    env = config.env.model_copy(update={"total_steps": total_steps})
    return config.model_copy(update={"env": env})


def replace_limits(
    config: RunConfig, limits: dict[str, Any], hint: str = "", *, is_owner: bool = False
) -> RunConfig:
    """Return the configuration with other limits.

    Raises:
        ConfigError: A field is not a limit (the message ends with `hint`), or a value is not
            allowed.
    """
    fields = ConfigFields(config.profile, is_owner=is_owner)
    values = config.model_dump()
    for name, value in limits.items():
        if name.removeprefix("limits.") not in values["limits"]:
            allowed_names = ", ".join(f"limits.{limit}" for limit in values["limits"])
            raise ConfigError(
                f"{shorten(repr(name))} cannot be changed when a run is resumed; allowed: "
                f"{allowed_names}, {STEPS_FIELD}{hint}"
            )
        field, checked = fields.check_edit(f"limits.{name.removeprefix('limits.')}", value)
        values["limits"][field.name] = checked
    return check_cost_limit(build_run_config(values))


def _reject_unusable_value(value: object) -> None:
    """Raise ValueError for values that types and ranges allow and no configuration needs.

    These are NaN, infinity, control characters, invalid Unicode, and very long texts.
    """
    for element in (
        value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    ):
        _reject_unusable_value(element)
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("it is not a finite number")
    if isinstance(value, str) and any(
        ord(character) < 32 and character not in "\n\t" for character in value
    ):
        raise ValueError("it has control characters")
    if isinstance(value, str) and any(0xD800 <= ord(character) <= 0xDFFF for character in value):
        raise ValueError(
            "it is not Unicode text (half of a surrogate pair, or bytes outside UTF-8)"
        )
    if isinstance(value, str) and len(value) > MAX_CHARACTERS:
        raise ValueError(f"it has more than {MAX_CHARACTERS} characters")


def describe_field(field: ConfigField, values: Mapping[str, Mapping[str, Any]]) -> Json:
    """Return the description of one field for users, with its value in this launch."""
    return {
        "name": field.name,
        "section": field.section,
        "type": field.type,
        "default": field.default,
        "allowed": describe_allowed(field.schema),
        "description": field.description,
        "current_value": values[field.section].get(field.name),
        "locked": field.lock_reason,
    }
