"""Read a batch of scored groups from JSON in small steps.

A batch of 128 rollouts of 8,000 tokens is some 40 MB of JSON. `json.loads` holds the interpreter's
lock for all of it, also in a thread, and the inference server of this process would answer nobody
meanwhile. Here each call into C reads one rollout, so that other threads get their turn in between,
and each list of numbers becomes an array at once.
"""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np

ARRAY_DTYPES = {"tokens": np.int64, "masks": np.int64, "inference_logprobs": np.float64}
STEPWISE_LEVELS = 4
"""The object of the answer, its list of groups, a group, and a list with one entry per rollout."""
WHITESPACE = re.compile(r"[ \t\n\r]*")
decode_value = json.JSONDecoder().raw_decode


def read_batch_json(content: bytes) -> Any:
    """Return what `json.loads` would, with an array for each rollout's tokens, masks and
    log-probabilities.

    Raises ValueError for what is not valid JSON. A list that does not fit into an array stays a
    list.
    """
    text = content.decode()
    try:
        value, end = _read_value(text, _skip_whitespace(text, 0), STEPWISE_LEVELS, "")
    except IndexError as error:
        raise ValueError("the text is not valid JSON") from error
    if _skip_whitespace(text, end) != len(text):
        raise ValueError(f"the text goes on behind its JSON value, at character {end}")
    return value


def _read_value(text: str, at: int, levels: int, key: str) -> tuple[Any, int]:
    """Return the value that begins at a position, and where it ends. `name` is the key under which
    it stands.
    """
    if levels and text[at] == "[":
        return _read_list(text, at, levels, key)
    if levels and text[at] == "{":
        return _read_object(text, at, levels)
    value, end = decode_value(text, at)
    return _to_array(value, key), end


def _read_list(text: str, at: int, levels: int, key: str) -> tuple[list[Any], int]:
    values: list[Any] = []
    at = _skip_whitespace(text, at + 1)
    if text[at] == "]":
        return values, at + 1
    while True:
        value, at = _read_value(text, at, levels - 1, key)
        values.append(value)
        at = _skip_whitespace(text, at)
        if text[at] == "]":
            return values, at + 1
        at = _skip_character(text, at, ",")


def _read_object(text: str, at: int, levels: int) -> tuple[dict[str, Any], int]:
    values: dict[str, Any] = {}
    at = _skip_whitespace(text, at + 1)
    if text[at] == "}":
        return values, at + 1
    while True:
        if text[at] != '"':
            raise ValueError(f"the text is not valid JSON: a key is missing at character {at}")
        key, at = decode_value(text, at)
        at = _skip_character(text, _skip_whitespace(text, at), ":")
        values[key], at = _read_value(text, at, levels - 1, key)
        at = _skip_whitespace(text, at)
        if text[at] == "}":
            return values, at + 1
        at = _skip_character(text, at, ",")


def _skip_whitespace(text: str, at: int) -> int:
    match = WHITESPACE.match(text, at)
    return match.end() if match else at


def _skip_character(text: str, at: int, character: str) -> int:
    """Return the position behind a mark and the space after it."""
    if text[at] != character:
        raise ValueError(f"the text is not valid JSON: {character} is missing at character {at}")
    return _skip_whitespace(text, at + 1)


def _to_array(value: Any, key: str) -> Any:
    if key not in ARRAY_DTYPES or not isinstance(value, list):
        return value
    try:
        array = np.asarray(value)
    except (ValueError, OverflowError):
        return value
    is_numeric_vector = array.ndim == 1 and array.dtype.kind in (
        "i" if ARRAY_DTYPES[key] is np.int64 else "if"
    )
    return array.astype(ARRAY_DTYPES[key]) if is_numeric_vector or not value else value
