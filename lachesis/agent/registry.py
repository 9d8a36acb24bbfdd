"""What a tool is: a function whose signature gives the schemas of its arguments and of its answer, in one table."""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import os
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, get_type_hints

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from lachesis.agent.session import Desk, Tell
from lachesis.base.errors import ArgumentsError, LachesisError, StorageError, error_to_payload, to_compact_json
from lachesis.config.run_config import format_validation_error
from lachesis.reporting.status import ResponseModel

log = logging.getLogger(__name__)
Json = dict[str, Any]
SESSION = "default"
MOST_NESTED = 30


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

    function: Callable[..., ResponseModel]
    hints: Hints
    preview: Callable[..., ResponseModel | None] | None = None

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
        answer: type[ResponseModel] = get_type_hints(self.function)["return"]
        schema: Json = answer.model_json_schema(mode="serialization")
        return schema

    def run(self, call: Call, arguments: Json | None, *, preview: bool = False) -> ResponseModel:
        """The answer, or with `preview` what a paid call would do. Raises LachesisError."""
        given = {} if arguments is None else arguments
        if not isinstance(given, dict) or not _is_text(given):
            raise ArgumentsError(f"{self.name}: the arguments are no JSON object of valid Unicode text, or nested too deeply")
        try:
            checked = self.arguments.model_validate(given)
        except ValidationError as error:
            known = ", ".join(self.arguments.model_fields) or "none"
            raise ArgumentsError(f"{self.name}: {format_validation_error(error)} (arguments: {known})") from error
        values = {name: getattr(checked, name) for name in self.arguments.model_fields}
        if preview and self.preview is not None and (shown := self.preview(call, **values)) is not None:
            return shown
        return self.function(call, **values)

    def call(self, call: Call, arguments: Json | None, *, preview: bool = False) -> tuple[Json, LachesisError | None]:
        """The answer as JSON and None, or an error as JSON and that error. Never raises."""
        return told(lambda: self.run(call, arguments, preview=preview).to_payload())

    def text(self, session: str, arguments: Json | None) -> str:
        """As `call`, as JSON text for a named session. Never raises."""
        return to_compact_json(told(lambda: self.run(Call(Desk(session)), arguments).to_payload())[0])


def told(answer: Callable[[], Any]) -> tuple[Any, LachesisError | None]:
    """What `answer()` gives and None, or its error as JSON and that error, whatever it raises."""
    try:
        return answer(), None
    except LachesisError as error:
        return error_to_payload(error), error
    except OSError as error:
        storage = StorageError(f"{error.filename or 'a file'}: {error.strerror or error}")
        return error_to_payload(storage), storage
    except Exception as error:
        log.exception("a tool failed")
        fault = LachesisError(f"a fault of Lachesis: {type(error).__name__}: {error}; its log has the traceback")
        return error_to_payload(fault), fault


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


def tool(hints: Hints, preview: Callable[..., ResponseModel | None] | None = None) -> Callable[[Callable[..., ResponseModel]], JsonText]:
    """Put a function into the table; what is left in its place is the async function that gives JSON text."""

    def register(function: Callable[..., ResponseModel]) -> JsonText:
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
