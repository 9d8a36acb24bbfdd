"""The table of tools. Name, description and schemas of each come from its function; every transport is made from this table.

A tool called as a function gives the JSON text of its answer and never raises: `await rl_list_runs()`. Transports use
`Tool.call`, which gives the answer as JSON and says whether it is an error.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import os
import sys
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Annotated, Any, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from lachesis import launcher
from lachesis.agent import answers
from lachesis.agent.desk import Desk, Tell, default_profile
from lachesis.config import PROFILES, explain
from lachesis.errors import ArgumentsError, LachesisError, StorageError, as_payload, as_text
from lachesis.inference_tests import TestOptions
from lachesis.profiles import missing_keys
from lachesis.reports import Report, RunResults

log = logging.getLogger(__name__)
Json = dict[str, Any]
SESSION = "default"
MOST_NESTED = 30
MINIMUM_PYTHON = (3, 11)


@dataclass(frozen=True)
class Hints:
    """What a client may show or assume of a tool; the names are those of MCP's annotations."""

    read_only: bool = False
    destructive: bool = False
    idempotent: bool = False
    open_world: bool = False


@dataclass(frozen=True)
class Call:
    """Whose call it is, and where its progress goes."""

    desk: Desk
    tell: Tell = lambda done, total, text: None


@dataclass(frozen=True)
class Tool:
    """One tool. `preview`, where there is one, tells what a call would do on a profile that may cost money."""

    function: Callable[..., Report]
    hints: Hints
    preview: Callable[..., Report | None] | None = None

    @property
    def name(self) -> str:
        return self.function.__name__

    @property
    def title(self) -> str:
        return self.name.removeprefix("rl_").replace("_", " ").capitalize()

    @property
    def description(self) -> str:
        return inspect.cleandoc(self.function.__doc__ or "")

    @functools.cached_property
    def arguments(self) -> type[BaseModel]:
        """The model that a call's arguments are checked with."""
        hints = get_type_hints(self.function, include_extras=True)
        fields: Json = {
            name: (hints[name], ... if parameter.default is parameter.empty else parameter.default)
            for name, parameter in list(inspect.signature(self.function).parameters.items())[1:]
        }
        return create_model(self.name, __config__=ConfigDict(extra="forbid", protected_namespaces=()), **fields)

    @functools.cached_property
    def input_schema(self) -> Json:
        schema: Json = self.arguments.model_json_schema()
        return {key: value for key, value in schema.items() if key != "title"}

    @functools.cached_property
    def output_schema(self) -> Json:
        answer: type[Report] = get_type_hints(self.function)["return"]
        schema: Json = answer.model_json_schema(mode="serialization")
        return schema

    def run(self, call: Call, arguments: Json | None, *, preview: bool = False) -> Report:
        """The answer, or with `preview` what a paid call would do. Raises LachesisError."""
        given = {} if arguments is None else arguments
        if not isinstance(given, dict) or not _is_text(given):
            raise ArgumentsError(f"{self.name}: the arguments are no JSON object of valid Unicode text, or nested too deeply")
        try:
            checked = self.arguments.model_validate(given)
        except ValidationError as error:
            known = ", ".join(self.arguments.model_fields) or "none"
            raise ArgumentsError(f"{self.name}: {explain(error)} (arguments: {known})") from error
        values = {name: getattr(checked, name) for name in self.arguments.model_fields}
        if preview and self.preview is not None and (shown := self.preview(call, **values)) is not None:
            return shown
        return self.function(call, **values)

    def call(self, call: Call, arguments: Json | None, *, preview: bool = False) -> tuple[Json, LachesisError | None]:
        """The answer as JSON and None, or an error as JSON and that error. Never raises."""
        return told(lambda: self.run(call, arguments, preview=preview).payload())

    def text(self, session: str, arguments: Json | None) -> str:
        """As `call`, as JSON text for a named session. Never raises."""
        return as_text(told(lambda: self.run(Call(Desk(session)), arguments).payload())[0])


def told(answer: Callable[[], Any]) -> tuple[Any, LachesisError | None]:
    """What `answer()` gives and None, or its error as JSON and that error, whatever it raises."""
    try:
        return answer(), None
    except LachesisError as error:
        return as_payload(error), error
    except OSError as error:
        storage = StorageError(f"{error.filename or 'a file'}: {error.strerror or error}")
        return as_payload(storage), storage
    except Exception as error:
        log.exception("a tool failed")
        fault = LachesisError(f"a fault of Lachesis: {type(error).__name__}: {error}; its log has the traceback")
        return as_payload(fault), fault


def _is_text(value: Any, depth: int = 0) -> bool:
    """Whether every text in it can be written and be part of a path, as JSON may hold half of a surrogate pair, or NUL; and
    that it is not nested beyond reason."""
    if isinstance(value, str):
        return "\0" not in value and not any("\ud800" <= one <= "\udfff" for one in value)
    if isinstance(value, dict | list) and depth > MOST_NESTED:
        return False
    inside = [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else []
    return all(_is_text(one, depth + 1) for one in inside)


TABLE: dict[str, Tool] = {}
JsonText = Callable[..., Coroutine[Any, Any, str]]


def tool(hints: Hints, preview: Callable[..., Report | None] | None = None) -> Callable[[Callable[..., Report]], JsonText]:
    """Put a function into the table; what is left in its place is the async function that gives JSON text."""

    def register(function: Callable[..., Report]) -> JsonText:
        made = Tool(function, hints, preview)
        TABLE[made.name] = made
        names = list(made.arguments.model_fields)

        @functools.wraps(function)
        async def as_function(*values: Any, **arguments: Any) -> str:
            given = {**dict(zip(names, values, strict=False)), **arguments}
            if len(values) > len(names):
                given["(surplus)"] = values[len(names) :]
            return await asyncio.to_thread(made.text, os.environ.get("LACHESIS_SESSION", SESSION), given)

        parameters = list(inspect.signature(function).parameters.values())[1:]
        as_function.__signature__ = inspect.Signature(parameters, return_annotation=str)  # type: ignore[attr-defined]
        return as_function

    return register


READ = Hints(read_only=True, idempotent=True)
RunId = Annotated[
    str, Field(max_length=100, description="Eight hexadecimal digits, as rl_start_training and rl_list_runs give them")
]


@tool(READ)
def rl_list_environments(call: Call) -> answers.EnvironmentList:
    """List the environments that can be trained on: name, class, file and what each is about."""
    return call.desk.environments()


@tool(Hints(idempotent=True))
def rl_select_environment(
    call: Call,
    name: Annotated[str, Field(max_length=200, description="A name from rl_list_environments")],
    profile: Annotated[
        str | None,
        Field(max_length=100, description="Where to train: embedded (this machine, no key), tinker (paid cloud) or custom"),
    ] = None,
    model: Annotated[
        str | None,
        Field(max_length=1000, description="Base model: a Hugging Face name or a folder; by default the profile's own"),
    ] = None,
) -> answers.Selected:
    """Select an environment and begin a new draft of its configuration with the default values.

    The draft is kept for this session, also when the agent restarts. The first look at an environment takes some seconds."""
    return call.desk.select(name, profile, model)


@tool(READ)
def rl_get_current_config(call: Call) -> answers.CurrentConfig:
    """Show every field of the selected environment: those that can be edited with their types and values, and those that are
    locked with the reason."""
    return call.desk.current_config()


@tool(Hints(idempotent=True))
def rl_edit_config(
    call: Call,
    field: Annotated[
        str, Field(max_length=200, description="A configurable field from rl_get_current_config, bare or as section.field")
    ],
    value: Annotated[Any, Field(description="The new value, of the field's type")],
) -> answers.Edited:
    """Set one field of the draft. A wrong type, a value out of range or a locked field is refused with what is allowed, and
    nothing changes."""
    return call.desk.edit(field, value)


def _preview_start(
    call: Call, *, dry_run: bool, resume: str | None, start_from: str | None, **_: Any
) -> answers.Started | None:
    if dry_run or not call.desk.is_paid(resume):
        return None
    shown = call.desk.preview_resume(resume) if resume is not None else call.desk.preview(start_from)
    update = {
        "message": f"{shown.message}. Profile {shown.profile} may cost money: show this to the user",
        "confirmation_required": True,
        "next_steps": ["ask the user; only after their yes call rl_start_training with the same arguments and confirm=true"],
    }
    return shown.model_copy(update=update)


@tool(Hints(open_world=True), preview=_preview_start)
def rl_start_training(
    call: Call,
    dry_run: Annotated[bool, Field(description="Only show the whole configuration, the services and their ports")] = False,
    resume: Annotated[
        str | None,
        Field(max_length=100, description="An ended run to continue from its newest checkpoint, instead of the draft"),
    ] = None,
    idempotency_key: Annotated[
        str | None, Field(min_length=1, max_length=200, description="The same key gives the same run")
    ] = None,
    allow_duplicate: Annotated[
        bool, Field(description="Start another run although the same draft was started less than a minute ago")
    ] = False,
    require_validation: Annotated[
        bool, Field(description="Refuse unless a test of this code, at most seven days old, found it learnable")
    ] = False,
    start_from: Annotated[
        str | None,
        Field(
            max_length=100, description="RUN or RUN@STEP: begin with the weights and optimizer of that checkpoint, at step 0"
        ),
    ] = None,
    limits: Annotated[
        dict[str, Any] | None,
        Field(max_length=10, description='With resume: new budgets, such as {"max_tokens": 500000}, when one is used up'),
    ] = None,
) -> answers.Started:
    """Start a training run from the draft and return its run id at once; training goes on without the agent.

    The same draft started twice within a minute gives the run that there is. When the host runs as many as it may, the run
    waits and `queue` has its place."""
    if resume is not None and (idempotency_key or allow_duplicate or require_validation or start_from):
        raise ArgumentsError(
            "resume is safe to repeat by itself; idempotency_key, allow_duplicate, require_validation and start_from are for "
            "new runs"
        )
    if limits is not None and resume is None:
        raise ArgumentsError("limits is for resume; those of a new run are fields of the draft, such as max_tokens")
    if dry_run:
        return call.desk.preview(start_from) if resume is None else call.desk.preview_resume(resume)
    if resume is not None:
        return call.desk.resume(resume, limits)
    return call.desk.start(
        key=idempotency_key, allow_duplicate=allow_duplicate, require_validation=require_validation, start_from=start_from
    )


@tool(READ)
def rl_check_status(call: Call, run_id: RunId) -> answers.CheckedStatus:
    """Tell how a run does: status, phase, progress with estimated time, processes, metrics, the last error with its log.
    `health` says whether it learns (healthy, suspect, broken), where it stalls and since when, and how much of its budgets is
    used.

    A live report about the same run is given once in 30 minutes; before that the last one, with `rate_limited`. A change of its
    status or phase is told at once, and a run that has ended is always reported."""
    return call.desk.status(run_id)


def _preview_stop(call: Call, *, run_id: str) -> answers.Stopped | None:
    record = call.desk.service.get(run_id)
    if record.ended or not call.desk.is_paid(run_id):
        return None
    return answers.Stopped(
        message=f"nothing was stopped: run {run_id} of {record.environment} is {record.status} on profile {record.profile}, "
        "which may have cost money. It would save a checkpoint and end; ask the user, then call again with confirm=true",
        run_id=run_id,
        status=record.status,
        confirmation_required=True,
    )


@tool(Hints(destructive=True, idempotent=True), preview=_preview_stop)
def rl_stop_training(call: Call, run_id: RunId) -> answers.Stopped:
    """[DESTRUCTIVE] End a run: it saves a checkpoint, then its processes end in order. Returns at once; it can be resumed."""
    return call.desk.stop(run_id)


@tool(READ)
def rl_get_results(call: Call, run_id: RunId) -> RunResults:
    """Give what came of a run: final metrics, a history of ten steps, held-out accuracy, and the trained weights with their
    typed paths and the local adapter folder."""
    return call.desk.results(run_id)


@tool(READ)
def rl_list_runs(
    call: Call, limit: Annotated[int | None, Field(ge=1, le=1000, description="At most so many, the newest first")] = None
) -> answers.RunList:
    """List all runs with their statuses, the newest first."""
    return call.desk.runs(limit)


@tool(Hints(open_world=True))
def rl_test_inference(
    call: Call,
    num_steps: Annotated[int, Field(ge=1, le=100, description="Groups per model, each of one item")] = 3,
    group_size: Annotated[int, Field(ge=1, le=256, description="Completions per item")] = 16,
    models: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=500)]] | None,
        Field(min_length=1, max_length=10, description="`embedded:tiny`, `embedded:FOLDER`, or names at the endpoint"),
    ] = None,
    prompts: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=20_000)]] | None,
        Field(min_length=1, max_length=50, description="Prompts of your own, answered and scored instead of items"),
    ] = None,
    max_tokens: Annotated[int, Field(ge=1, le=100_000, description="Of one response; with prompts only")] = 256,
    temperature: Annotated[float, Field(ge=0, le=2, description="With prompts only")] = 1.0,
    test_id: Annotated[str | None, Field(max_length=100, description="Ask again for a test that had not ended")] = None,
) -> answers.TestReport:
    """Try the selected environment before training: does it work, can a model learn from it, and what would a run take?

    The environment is checked in stages, then models answer a few items. `summary.verdict` is learnable, too easy, too hard or
    broken, with its evidence per model; `summary.forecast` has tokens, time and money of a run with the draft's values. Waits
    at most 25 seconds; a test that takes longer goes on, and `test_id` asks again."""
    if test_id is not None:
        return call.desk.test_again(test_id, call.tell)
    wanted = TestOptions(
        num_steps=num_steps,
        group_size=group_size,
        models=models,
        prompts=prompts,
        max_tokens=max_tokens if prompts else None,
        temperature=temperature if prompts else None,
    )
    return call.desk.test(wanted, call.tell)


@tool(READ)
def rl_health_check(call: Call) -> answers.Health:
    """Tell whether the Prefect server, the keys and the environments are there, which session this is, and which runs live."""
    return call.desk.health()


def check_rl_python_version() -> bool:
    """Whether this Python is new enough."""
    return sys.version_info >= MINIMUM_PYTHON


def get_missing_keys() -> list[str]:
    """The names of the keys that the chosen profile ($LACHESIS_PROFILE) needs and that are nowhere; none for `embedded`."""
    profile = default_profile()
    if profile not in PROFILES:
        return []
    return [key for key in missing_keys(profile, launcher.key_names()) if not os.environ.get(key)]


def check_rl_api_keys() -> bool:
    """Whether the tools can be offered: a Python that is new enough, and the keys of the chosen profile."""
    return check_rl_python_version() and not get_missing_keys()
