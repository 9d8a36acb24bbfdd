"""Define launches: `LaunchSpec` is a training run, `TestSpec` an inference test.

Command line, launch files, `--like`, tools, HTTP, Prefect's forms and schedules are all read into
them. `lachesis.launch.resolve` completes a spec, the record of the run or test holds it, and
Prefect shows it as the parameters of the flow run. Reading a spec imports no environment: what a
setting may be is checked when the spec is resolved.
"""

import json
import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from lachesis.base.argparse_types import MAX_SEED
from lachesis.base.errors import ArgumentsError, FieldValueError, LachesisError, shorten
from lachesis.base.json_text import Json
from lachesis.base.secrets import redact
from lachesis.config.profiles import PROFILES
from lachesis.config.value_parsing import describe_allowed

RUN_ID_PATTERN = "^[0-9a-f]{8}$"
STEPS_FIELD, SEED_FIELD = "env.total_steps", "tinker.seed"
MAX_NAME_LENGTH, MAX_NOTE_LENGTH, MAX_TAGS = 60, 1000, 20
# Text on one line.
NAME_PATTERN = rf"^[^\x00-\x1f\x7f]{{1,{MAX_NAME_LENGTH}}}$"
TAG_PATTERN = r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,39}"
MAX_SETTINGS_LENGTH = 100_000
Spec = TypeVar("Spec", bound="_Spec")


def check_name(name: str) -> str | None:
    """Return a run's name, or None if it is empty.

    Raises:
        FieldValueError: It is too long or has control characters.
    """
    if name and not re.fullmatch(NAME_PATTERN, name):
        raise FieldValueError(
            f"the name {shorten(repr(name), 80)} cannot be used; allowed: text of at most "
            f"{MAX_NAME_LENGTH} characters on one line"
        )
    return name or None


def check_note(note: str) -> str | None:
    """Return a note without white space at its ends, or None if it is empty.

    Raises:
        FieldValueError: It is too long or has control characters.
    """
    note = note.strip()
    if len(note) > MAX_NOTE_LENGTH or re.search(r"[\x00-\x08\x0b-\x1f\x7f]", note):
        raise FieldValueError(
            f"the note {shorten(repr(note), 80)} ({len(note)} characters) cannot be used; allowed: "
            f"text of at most {MAX_NOTE_LENGTH} characters"
        )
    return note or None


def check_tags(tags: Iterable[str]) -> list[str]:
    """Return the tags in alphabetical order, each one once.

    Raises:
        FieldValueError: A tag has characters that are not allowed, or there are too many.
    """
    unique_tags = sorted(set(tags))
    for tag in unique_tags:
        if not re.fullmatch(TAG_PATTERN, tag):
            raise FieldValueError(
                f"the tag {shorten(repr(tag), 60)} cannot be used; allowed: at most 40 letters, "
                "digits and . _ - : /, the first one a letter or a digit"
            )
    if len(unique_tags) > MAX_TAGS:
        raise FieldValueError(f"{len(unique_tags)} tags; allowed: at most {MAX_TAGS}")
    return unique_tags


def parse_assignment(text: str) -> tuple[str, str]:
    """Split `field=value` from a command line; the value stays the text that was typed.

    `ConfigFields.check_edit` converts it to the type of its field.

    Raises:
        FieldValueError: The text is not an assignment.
    """
    name, separator, value = text.partition("=")
    if not separator or not name.strip():
        shown = shorten(repr(text))
        raise FieldValueError(
            f"{shown} is not an assignment; allowed: field=value, as in group_size=8"
        )
    return name.strip(), value


def parse_settings(text: str) -> dict[str, str]:
    """Return the settings that lines of `key=value` make; the last of several for a key counts.

    A line that begins with a blank continues the value before it; empty lines and those that begin
    with `#` are left out.

    Raises:
        FieldValueError: A line is not an assignment.
    """
    settings: dict[str, str] = {}
    last_key = ""
    for number, line in enumerate(text.splitlines(), 1):
        if line[:1] in (" ", "\t") and last_key:
            settings[last_key] += f"\n{line[1:]}"
        elif line.strip() and not line.startswith("#"):
            try:
                last_key, value = parse_assignment(line)
            except FieldValueError as error:
                raise FieldValueError(f"settings, line {number}: {error}") from error
            settings[last_key] = value
    return settings


def format_settings(settings: Mapping[str, Any]) -> str:
    """Return the lines of `key=value` that `parse_settings` reads."""
    lines = []
    for name, value in settings.items():
        text = value if isinstance(value, str) else json.dumps(value)
        lines.append(f"{name}={text}".replace("\n", "\n "))
    return "\n".join(lines)


def _read_settings(value: object) -> object:
    if isinstance(value, str) and len(value) <= MAX_SETTINGS_LENGTH:
        return parse_settings(value)
    return value


# Fields by SECTION.FIELD or FIELD, also written as lines of text.
Settings = Annotated[
    dict[str, Any], BeforeValidator(_read_settings, json_schema_input_type=dict[str, Any] | str)
]


class RunLimits(BaseModel):
    """Hold the limits of a run, which saves a checkpoint and stops at the first that it reaches."""

    model_config = ConfigDict(extra="forbid", strict=True)

    max_hours: float | None = Field(
        None, title="Hours", gt=0, le=100_000, description="Hours of all attempts together."
    )
    max_tokens: int | None = Field(
        None,
        title="Tokens",
        ge=1,
        le=10**12,
        description="Tokens that are read, sampled and trained on, together.",
    )
    max_cost_usd: float | None = Field(
        None, title="US dollars", gt=0, le=1e9, description="Cost by the price table."
    )


class _Spec(BaseModel):
    """Hold the fields that a training run and a test share."""

    model_config = ConfigDict(
        extra="forbid", strict=True, use_attribute_docstrings=True, protected_namespaces=()
    )

    environment: str = Field(min_length=1, max_length=4096)
    """The environment: a name from `lachesis env list`, or the path of a file."""
    profile: str = Field("embedded", json_schema_extra={"enum": [*sorted(PROFILES)]})
    """Where the model is trained: `embedded` on this machine, `tinker` on the Tinker cloud,
    `custom` at another server of the Tinker protocol."""
    model: str | None = Field(None, min_length=1, max_length=4096)
    """Base model: a name on Hugging Face, a folder, or `tiny`. Empty: the profile's model, or a
    tiny model that was pretrained on the environment."""
    settings: Settings = {}
    """Further fields, one `key=value` on each line, as in `tinker.learning_rate=0.001`; `lachesis
    env show NAME` lists them."""
    by_agent: bool = False
    """Reserved for programs; leave it off. An agent may not set fields that are locked for agents.
    """

    def list_edits(self) -> dict[str, Any]:
        """Return the values of all fields that are set, by the names that were used for them."""
        return dict(self.settings)

    def to_parameters(self) -> Json:
        """Return the set fields, without secrets, as the parameters of a flow run."""
        values = self.model_dump(mode="json", exclude_defaults=True)
        values["profile"] = self.profile
        if self.settings:
            values["settings"] = format_settings(self.settings)
        return {
            name: redact(value) if isinstance(value, str) else value
            for name, value in values.items()
        }


class LaunchSpec(_Spec):
    """Describe a training run."""

    steps: int | None = Field(None, ge=1, le=10_000_000)
    """Training steps. Empty: the profile's number."""
    name: Annotated[str, AfterValidator(check_name)] | None = None
    """A name of your own for the run, which lists and pages show."""
    note: Annotated[str, AfterValidator(check_note)] | None = None
    """What you want to remember about the run."""
    tags: Annotated[list[str], AfterValidator(check_tags)] = []
    """Words to find the run by."""
    seed: int | None = Field(None, ge=0, le=MAX_SEED)
    """Seed of all random numbers. Empty: the profile's seed."""
    from_checkpoint: str | None = Field(None, min_length=1, max_length=100)
    """Start with the weights of a checkpoint: `RUN`, `RUN@STEP` or `RUN@best`. In a schedule also
    `last` or `best`: that checkpoint of the schedule's last run."""
    require_validation: bool = False
    """Refuse unless a recent test found the environment learnable. On paid profiles it is required
    in any case."""
    without_validation: bool = False
    """On a paid profile, do not require such a test."""
    confirmed: bool = False
    """On a paid profile, agree to what the run costs. `lachesis train … --dry-run` shows the
    forecast; a limit of US dollars counts as agreed too."""
    limits: RunLimits | None = None
    """At the first limit that is reached, the run saves a checkpoint and stops."""

    def list_edits(self) -> dict[str, Any]:
        """Return the values of all fields that are set, by the names that were used for them."""
        edits = dict(self.settings)
        if self.steps is not None:
            edits[STEPS_FIELD] = self.steps
        if self.seed is not None:
            edits[SEED_FIELD] = self.seed
        if self.limits is not None:
            limits = self.limits.model_dump(exclude_none=True)
            edits |= {f"limits.{name}": value for name, value in limits.items()}
        return edits

    def with_set_fields(self, set_fields: Mapping[str, Any]) -> "LaunchSpec":
        """Return the spec with these fields set, by SECTION.FIELD, and no others."""
        fields = dict(sorted(set_fields.items()))
        limits = {
            name: fields.pop(f"limits.{name}")
            for name in RunLimits.model_fields
            if fields.get(f"limits.{name}") is not None
        }
        update = {
            "steps": fields.pop(STEPS_FIELD, None),
            "seed": fields.pop(SEED_FIELD, None),
            "limits": RunLimits.model_validate(limits) if limits else None,
            "settings": fields,
        }
        return self.model_copy(update=update)


class TestSpec(_Spec):
    """Describe an inference test: models answer some items of an environment."""

    __test__ = False  # pytest must not collect this class.

    models: list[str] | None = Field(None, min_length=1, max_length=10)
    """The models: names at an endpoint, `embedded:NAME_OR_FOLDER` on this machine, `tinker:NAME` at
    the Tinker server. Empty: the model that would be trained."""
    steps: int = Field(3, ge=1, le=10_000)
    """Groups per model, each of one item."""
    group_size: int = Field(16, ge=1, le=1024)
    """Answers per item."""
    prompts: list[str] | None = Field(None, min_length=1, max_length=100)
    """Prompts of your own, instead of the environment's items."""
    max_tokens: int | None = Field(None, ge=1, le=10_000_000)
    """Tokens of an answer; with prompts only."""
    temperature: float | None = Field(None, ge=0, le=100)
    """Temperature of the answers; with prompts only."""

    @property
    def num_groups(self) -> int:
        """Return how many groups each model answers."""
        return len(self.prompts or ()) or self.steps

    def to_launch(self) -> LaunchSpec:
        """Return the training run whose environment, model and settings are tested."""
        return LaunchSpec(**{name: getattr(self, name) for name in _Spec.model_fields})


def read_spec(model: type[Spec], values: Mapping[str, Any]) -> Spec:
    """Return values that somebody wrote as a spec; None and an empty text count as left out.

    Raises:
        ArgumentsError: A value is missing, unknown, of the wrong type or out of range; the message
            names it and says what is allowed.
        FieldValueError: A name, a note, a tag or a line of settings cannot be used.
    """
    try:
        present = {name: value for name, value in values.items() if value not in (None, "")}
        return model.model_validate(present)
    except ValidationError as error:
        cause = error.errors()[0].get("ctx", {}).get("error")
        if isinstance(cause, LachesisError):
            raise cause from error
        raise ArgumentsError(_describe_problem(model, error)) from error


def _describe_problem(model: type[BaseModel], error: ValidationError) -> str:
    """Describe the first problem: the parameter, its value, and the allowed values."""
    problem = error.errors()[0]
    *parents, field = (str(part) for part in problem["loc"] if part != "function-after")
    schema = model.model_json_schema()
    properties = schema["properties"]
    if parents == ["limits"]:
        properties = schema["$defs"][RunLimits.__name__]["properties"]
    path = ".".join((*parents, field))
    if problem["type"] == "missing":
        return f"the parameter {path} is missing; {_describe_parameter(properties[field])}"
    if problem["type"] == "extra_forbidden":
        return f"there is no parameter {shorten(repr(path))}; allowed: {', '.join(properties)}"
    shown = shorten(repr(problem["input"]))
    return f"the parameter {path} is {shown}; {_describe_parameter(properties.get(field, {}))}"


def _describe_parameter(schema: Json) -> str:
    return f"allowed: {describe_allowed(schema)}"
