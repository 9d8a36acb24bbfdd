"""Define the parameters that training runs and tests have in Prefect.

The forms of the deployments `train` and `test`, schedules, automations, `prefect deployment run`,
the command line and the tools of agents all use these parameters.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from lachesis.base.argparse_types import MAX_SEED
from lachesis.base.errors import ArgumentsError, FieldValueError, shorten
from lachesis.base.json_text import Json
from lachesis.base.secrets import redact
from lachesis.config.field_edits import describe_allowed, parse_assignment
from lachesis.environment_catalog.lookup import get_name_or_file
from lachesis.inference_tests.store import TestOptions
from lachesis.launch.choose_model import LaunchRequest
from lachesis.runs.names_and_tags import MAX_NAME_LENGTH, NAME_PATTERN

RUN_ID_PATTERN = "^[0-9a-f]{8}$"
STEPS_FIELD, SEED_FIELD = "env.total_steps", "tinker.seed"
Parameters = TypeVar("Parameters", bound=BaseModel)


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


class TrainingParameters(BaseModel):
    """Hold the parameters of the deployment `train`, checked for their types and ranges."""

    model_config = ConfigDict(extra="forbid", strict=True)

    environment: str = Field(min_length=1, max_length=4096)
    profile: str = "embedded"
    steps: int | None = Field(None, ge=1, le=10_000_000)
    model: str | None = Field(None, min_length=1, max_length=4096)
    name: str | None = Field(None, pattern=NAME_PATTERN)
    seed: int | None = Field(None, ge=0, le=MAX_SEED)
    from_checkpoint: str | None = Field(None, min_length=1, max_length=100)
    require_validation: bool = False
    without_validation: bool = False
    confirmed: bool = False
    settings: str | None = Field(None, max_length=100_000)
    limits: RunLimits | None = None
    run_id: str | None = Field(None, pattern=RUN_ID_PATTERN)
    by_agent: bool = False

    def to_request(self) -> LaunchRequest:
        """Return the launch that these parameters describe; only an agent's has an agent's rights.

        Raises:
            FieldValueError: A line of `settings` is not an assignment.
        """
        edits: list[tuple[str, Any]] = list(parse_settings(self.settings or ""))
        if self.steps is not None:
            edits.append((STEPS_FIELD, self.steps))
        if self.limits is not None:
            limits = self.limits.model_dump(exclude_none=True)
            edits += [(f"limits.{name}", value) for name, value in limits.items()]
        return LaunchRequest(
            self.environment,
            self.profile,
            tuple(edits),
            self.model,
            self.seed,
            self.require_validation,
            self.without_validation,
            self.confirmed,
            by_owner=not self.by_agent,
            start_from=self.from_checkpoint,
            name=self.name,
        )


class TestParameters(BaseModel):
    """Hold the parameters of the deployment `test`, checked for their types and ranges."""

    __test__ = False  # pytest must not collect this class.
    model_config = ConfigDict(extra="forbid", strict=True)

    environment: str = Field(min_length=1, max_length=4096)
    profile: str = "embedded"
    models: list[str] | None = Field(None, min_length=1, max_length=10)
    model: str | None = Field(None, min_length=1, max_length=4096)
    steps: int = Field(3, ge=1, le=10_000)
    group_size: int = Field(16, ge=1, le=1024)
    prompts: list[str] | None = Field(None, min_length=1, max_length=100)
    max_tokens: int | None = Field(None, ge=1, le=10_000_000)
    temperature: float | None = Field(None, ge=0, le=100)
    settings: str | None = Field(None, max_length=100_000)
    test_id: str | None = Field(None, pattern=RUN_ID_PATTERN)
    by_agent: bool = False

    def to_request(self) -> LaunchRequest:
        """Return the launch whose environment and model are tested."""
        edits = tuple(parse_settings(self.settings or ""))
        return LaunchRequest(
            self.environment, self.profile, edits, self.model, by_owner=not self.by_agent
        )

    def to_options(self) -> TestOptions:
        """Return the options of the test."""
        return TestOptions(
            num_steps=self.steps,
            group_size=self.group_size,
            models=self.models,
            prompts=self.prompts,
            max_tokens=self.max_tokens,
            temperature=self.temperature,
        )


def check_parameters(model: type[Parameters], values: Mapping[str, Any]) -> Parameters:
    """Return the values as this model; None and an empty text count as left out.

    Raises:
        ArgumentsError: A parameter is missing, unknown, of the wrong type or out of range; the
            message names it and says what is allowed.
    """
    try:
        present = {name: value for name, value in values.items() if value not in (None, "")}
        return model.model_validate(present)
    except ValidationError as error:
        raise ArgumentsError(_describe_problem(model, error)) from error


def _describe_problem(model: type[BaseModel], error: ValidationError) -> str:
    """Return a sentence about the first problem, which names the parameter and what is allowed."""
    problem = error.errors()[0]
    *parents, field = (str(part) for part in problem["loc"])
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
    pattern_words = {
        NAME_PATTERN: f"text of at most {MAX_NAME_LENGTH} characters on one line",
        RUN_ID_PATTERN: "eight hexadecimal digits",
    }
    for alternative in schema.get("anyOf") or [schema]:
        if alternative.get("pattern") in pattern_words:
            return f"allowed: {pattern_words[alternative['pattern']]}"
    return f"allowed: {describe_allowed(schema)}"


def parse_settings(text: str) -> list[tuple[str, str]]:
    """Return the edits that lines of `key=value` make.

    A line that begins with a blank continues the value before it; empty lines and those that begin
    with `#` are left out.

    Raises:
        FieldValueError: A line is not an assignment.
    """
    edits: list[tuple[str, str]] = []
    for number, line in enumerate(text.splitlines(), 1):
        if line[:1] in (" ", "\t") and edits:
            edits[-1] = (edits[-1][0], f"{edits[-1][1]}\n{line[1:]}")
        elif line.strip() and not line.startswith("#"):
            try:
                edits.append(parse_assignment(line))
            except FieldValueError as error:
                raise FieldValueError(f"settings, line {number}: {error}") from error
    return edits


def format_settings(values: Mapping[str, Any]) -> str | None:
    """Return the lines of `key=value` that `parse_settings` reads, or None for no values."""
    lines = []
    for name, value in values.items():
        text = value if isinstance(value, str) else json.dumps(value)
        lines.append(f"{name}={text}".replace("\n", "\n "))
    return "\n".join(lines) or None


def make_parameters(
    request: LaunchRequest, environment_file: str, set_fields: Mapping[str, Any], run_id: str
) -> Json:
    """Return the parameters of a launch that was resolved, as its flow run shows them.

    `set_fields` are the values that it sets, by SECTION.FIELD. Secrets of this process are replaced
    in the result; the run has them from its own configuration.
    """
    fields = dict(set_fields)
    limit_names = [f"limits.{name}" for name in RunLimits.model_fields]
    limits = {name.partition(".")[2]: fields.pop(name) for name in limit_names if name in fields}
    parameters = {
        "environment": get_name_or_file(request.environment, environment_file),
        "profile": request.profile,
        "steps": fields.pop(STEPS_FIELD, None),
        "model": request.model,
        "name": request.name,
        "seed": fields.pop(SEED_FIELD, None),
        "from_checkpoint": request.start_from,
        "require_validation": request.require_validation or None,
        "without_validation": request.without_validation or None,
        "settings": format_settings(fields),
        "limits": limits or None,
        "run_id": run_id,
        "by_agent": not request.by_owner or None,
    }
    return _redact_parameters(parameters)


def make_test_parameters(
    request: LaunchRequest,
    options: TestOptions,
    environment_file: str,
    set_fields: Mapping[str, Any],
) -> Json:
    """Return the parameters of a test as its flow run shows them; see `make_parameters`."""
    return _redact_parameters(
        {
            "environment": get_name_or_file(request.environment, environment_file),
            "profile": request.profile,
            "models": options.models,
            "model": request.model,
            "steps": options.num_steps,
            "group_size": options.group_size,
            "prompts": options.prompts,
            "max_tokens": options.max_tokens,
            "temperature": options.temperature,
            "settings": format_settings(set_fields),
            "by_agent": not request.by_owner or None,
        }
    )


def _redact_parameters(parameters: Json) -> Json:
    """Return the parameters that have a value, without secrets."""
    return {
        name: redact(value) if isinstance(value, str) else value
        for name, value in parameters.items()
        if value is not None
    }
