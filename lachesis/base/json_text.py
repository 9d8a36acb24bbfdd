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
    """Return an error as all transports send it: its message as `error`, its `code`, its
    `former_code` if it had another one, and its details.
    """
    payload: dict[str, Any] = {"error": str(error), "code": error.code}
    if error.former_code is not None:
        payload["former_code"] = error.former_code
    return {**payload, **error.details}
