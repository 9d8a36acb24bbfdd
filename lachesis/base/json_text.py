"""Write values as compact JSON text, and errors as the JSON that every transport sends."""

from __future__ import annotations

import json
from typing import Any

from lachesis.base.errors import LachesisError

# A JSON object whose keys the code does not fix.
Json = dict[str, Any]


def to_compact_json(value: object) -> str:
    """Return a value as JSON text without spaces, because agents pay for every token they read."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False, default=str)


def error_to_payload(error: LachesisError) -> dict[str, Any]:
    """Return an error as all transports send it: its message as `error`, its `code`, and its
    details.
    """
    return {"error": str(error), "code": error.code, **error.details}
