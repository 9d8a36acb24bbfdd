"""Parse a batch of scored groups from JSON in small steps.

A batch of 128 rollouts of 8,000 tokens is about 40 MB of JSON. `json.loads` holds the interpreter's
lock for all of it, even in a thread, and the inference server of this process could not respond
meanwhile. Here each call into C reads one rollout, so that other threads run in between, and each
list of numbers becomes an array at once.
"""

import json
import re
from typing import Any

import numpy as np

ARRAY_DTYPES = {"tokens": np.int64, "masks": np.int64, "inference_logprobs": np.float64}
# Levels that are parsed step by step: the response, its groups, a group, and a list of rollouts.
STEPWISE_LEVELS = 4
WHITESPACE = re.compile(r"[ \t\n\r]*")
decode_value = json.JSONDecoder().raw_decode


def read_batch_json(content: bytes) -> Any:
    """Return the result of `json.loads`, with an array for each rollout's tokens, masks and
    log-probabilities.

    A list that does not fit into an array stays a list.

    Raises:
        ValueError: The text is not valid JSON.
    """
    text = content.decode()
    try:
        value, end = _read_value(text, _skip_whitespace(text, 0), STEPWISE_LEVELS, "")
    except IndexError as error:
        raise ValueError("the text is not valid JSON") from error
    if _skip_whitespace(text, end) != len(text):
        raise ValueError(f"there is text after the JSON value, at character {end}")
    return value


def _read_value(text: str, at: int, levels: int, key: str) -> tuple[Any, int]:
    """Return the value at a position, which belongs to `key`, and the position after it."""
    if levels and text[at] == "[":
        return _read_list(text, at, levels, key)
    if levels and text[at] == "{":
        return _read_object(text, at, levels)
    value, end = decode_value(text, at)
    return _to_array(value, key), end


def _read_list(text: str, at: int, levels: int, key: str) -> tuple[list[Any], int]:
    """Return the list that begins at a position, and the position after it."""
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
    """Return the object that begins at a position, and the position after it."""
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
    if match:
        return match.end()
    return at


def _skip_character(text: str, at: int, character: str) -> int:
    """Return the position after a character and the space behind it."""
    if text[at] != character:
        raise ValueError(f"the text is not valid JSON: {character} is missing at character {at}")
    return _skip_whitespace(text, at + 1)


def _to_array(value: object, key: str) -> Any:
    """Return a list of numbers as an array of the key's type, and others unchanged."""
    if key not in ARRAY_DTYPES or not isinstance(value, list):
        return value
    try:
        array = np.asarray(value)
    except (ValueError, OverflowError):
        return value
    is_numeric_vector = array.ndim == 1 and array.dtype.kind in (
        "i" if ARRAY_DTYPES[key] is np.int64 else "if"
    )
    if is_numeric_vector or not value:
        return array.astype(ARRAY_DTYPES[key])
    return value
