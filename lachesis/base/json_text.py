"""Read and write JSON: compact texts, files with a record on each line, and typed answers."""

import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict
from pydantic_core import from_json

from lachesis.base.errors import LachesisError

# A JSON object whose keys the code does not fix.
Json = dict[str, Any]


def to_compact_json(value: object) -> str:
    """Return a value as JSON text without spaces, because agents pay for every token they read."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False, default=str)


def error_to_payload(error: LachesisError) -> dict[str, Any]:
    """Return an error as all transports send it: `error`, `code`, and its details."""
    return {"error": str(error), "code": error.code, **error.details}


def split_lines(text: str) -> list[str]:
    """Return the lines of `text` without their line feeds or carriage returns with line feeds."""
    return [line.removesuffix("\r") for line in text.split("\n")]


def parse_json_lines(content: bytes) -> list[Json]:
    """Return the objects of `content` in order.

    A line that is not a complete JSON object is left out: a killed process or a full disk may have
    cut it.
    """
    objects = []
    for line in content.split(b"\n"):
        if not line.strip():
            continue
        try:
            value = _parse_json(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            objects.append(value)
    return objects


def _parse_json(line: bytes) -> Any:
    """Return the value of a line as `json.loads` does; this takes a quarter of its time."""
    try:
        return from_json(line)
    except ValueError:
        # Half of a surrogate pair, or a broken byte, which a model may well have written.
        return json.loads(line.decode("utf-8", errors="replace"))


def read_json_lines(path: Path) -> list[Json]:
    """Return the objects of a file in order; none if it cannot be read."""
    try:
        return parse_json_lines(path.read_bytes())
    except OSError:
        return []


class ResponseModel(BaseModel):
    """A typed answer; an absent field is not known, and null means no value."""

    model_config = ConfigDict(use_attribute_docstrings=True, protected_namespaces=())

    def to_payload(self) -> Json:
        """Return the answer as plain JSON."""
        return self.model_dump(mode="json", exclude_unset=True)
