"""Define what a tool is, and enter functions into the table of tools.

A tool is a function whose signature defines the JSON schema of its arguments, and whose answer is a
JSON object.
"""

import asyncio
import functools
import inspect
import logging
import os
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, get_type_hints

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from lachesis.agent_tools.answer_size import shorten_answer
from lachesis.agent_tools.session import AgentSession, ReportProgress
from lachesis.base.errors import ArgumentsError, LachesisError, StorageError
from lachesis.base.json_text import Json, error_to_payload, to_compact_json
from lachesis.config.run_config import format_validation_error

log = logging.getLogger(__name__)
DEFAULT_SESSION = "default"
MAX_NESTING = 30


@dataclass(frozen=True)
class ToolHints:
    """What a client may show or assume about a tool, under the names of MCP's annotations."""

    read_only: bool = False
    destructive: bool = False
    idempotent: bool = False
    open_world: bool = False


@dataclass(frozen=True)
class CallContext:
    """The session that a call belongs to, and the receiver of its progress."""

    session: AgentSession
    report_progress: ReportProgress = lambda done, total, text: None


@dataclass(frozen=True)
class AgentTool:
    """Describe one tool."""

    function: Callable[..., Json]
    hints: ToolHints

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
        """Return the pydantic model that validates a call's arguments."""
        type_hints = get_type_hints(self.function, include_extras=True)
        fields: Json = {
            name: (
                type_hints[name],
                ... if parameter.default is parameter.empty else parameter.default,
            )
            for name, parameter in list(inspect.signature(self.function).parameters.items())[1:]
        }
        return create_model(
            self.name, __config__=ConfigDict(extra="forbid", protected_namespaces=()), **fields
        )

    @functools.cached_property
    def input_schema(self) -> Json:
        schema: Json = self.arguments.model_json_schema()
        return {key: value for key, value in schema.items() if key != "title"}

    def run(self, context: CallContext, arguments: Json | None) -> Json:
        """Return the answer of a call as JSON of at most 40 kB.

        Raises:
            LachesisError: The arguments are invalid, or the tool fails.
        """
        raw_arguments = {} if arguments is None else arguments
        if not isinstance(raw_arguments, dict) or not _is_storable_json(raw_arguments):
            raise ArgumentsError(
                f"{self.name}: the arguments are not a JSON object of valid Unicode text, or are "
                f"nested too deeply"
            )
        try:
            validated_arguments = self.arguments.model_validate(raw_arguments)
        except ValidationError as error:
            allowed_names = ", ".join(self.arguments.model_fields) or "none"
            raise ArgumentsError(
                f"{self.name}: {format_validation_error(error)} (arguments: {allowed_names})"
            ) from error
        values = {name: getattr(validated_arguments, name) for name in self.arguments.model_fields}
        return shorten_answer(self.function(context, **values))

    def run_safely(
        self, context: CallContext, arguments: Json | None
    ) -> tuple[Json, LachesisError | None]:
        """Return the answer as JSON and None, or an error as JSON and the error; never raise."""
        return run_catching_errors(lambda: self.run(context, arguments))

    def run_as_text(self, session_name: str, arguments: Json | None) -> str:
        """Return the answer or the error for a named session as JSON text; never raise."""
        return to_compact_json(
            run_catching_errors(
                lambda: self.run(CallContext(AgentSession(session_name)), arguments)
            )[0]
        )


def run_catching_errors(make_answer: Callable[[], Any]) -> tuple[Any, LachesisError | None]:
    """Return the answer and None, or the error as JSON and the error; never raise."""
    try:
        return make_answer(), None
    except LachesisError as error:
        return error_to_payload(error), error
    except OSError as error:
        storage_error = StorageError(f"{error.filename or 'a file'}: {error.strerror or error}")
        return error_to_payload(storage_error), storage_error
    except Exception as error:
        log.exception("a tool failed")
        internal_error = LachesisError(
            f"an error in Lachesis: {type(error).__name__}: {error}; its log has the traceback"
        )
        return error_to_payload(internal_error), internal_error


def _is_storable_json(value: Any, depth: int = 0) -> bool:
    """Return whether the value can be stored and is not nested too deeply.

    JSON text may contain half of a surrogate pair, which UTF-8 cannot encode, or NUL, which a path
    cannot contain.
    """
    if isinstance(value, str):
        return "\0" not in value and not any(
            "\ud800" <= character <= "\udfff" for character in value
        )
    if isinstance(value, dict | list) and depth > MAX_NESTING:
        return False
    if isinstance(value, dict):
        children = [*value, *value.values()]
    elif isinstance(value, list):
        children = value
    else:
        children = []
    return all(_is_storable_json(child, depth + 1) for child in children)


TOOLS: dict[str, AgentTool] = {}
JsonTextFunction = Callable[..., Coroutine[Any, Any, str]]


def tool(hints: ToolHints) -> Callable[[Callable[..., Json]], JsonTextFunction]:
    """Add a function to the table, and return it as a coroutine that gives JSON text."""

    def register(function: Callable[..., Json]) -> JsonTextFunction:
        """Add the tool of a function."""
        registered_tool = AgentTool(function, hints)
        TOOLS[registered_tool.name] = registered_tool
        names = list(registered_tool.arguments.model_fields)

        @functools.wraps(function)
        async def as_function(*values: Any, **arguments: Any) -> str:
            """Call the tool in a thread with these values, and return its answer as JSON text."""
            merged_arguments = {**dict(zip(names, values, strict=False)), **arguments}
            if len(values) > len(names):
                merged_arguments["(surplus)"] = values[len(names) :]
            return await asyncio.to_thread(
                registered_tool.run_as_text,
                os.environ.get("LACHESIS_SESSION", DEFAULT_SESSION),
                merged_arguments,
            )

        parameters = list(inspect.signature(function).parameters.values())[1:]
        as_function.__signature__ = inspect.Signature(parameters, return_annotation=str)  # type: ignore[attr-defined]
        return as_function

    return register
