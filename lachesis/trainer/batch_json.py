"""Read a batch of scored groups from JSON in small steps.

A batch of 128 rollouts of 8,000 tokens is some 40 MB of JSON. `json.loads` holds the interpreter's lock for all of it, also in
a thread, and the inference server of this process would answer nobody meanwhile. Here each call into C reads one rollout, so
that other threads get their turn in between, and each list of numbers becomes an array at once.
"""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np

ARRAYS = {"tokens": np.int64, "masks": np.int64, "inference_logprobs": np.float64}
LEVELS = 4
"""The object of the answer, its list of groups, a group, and a list with one entry per rollout."""
SPACE = re.compile(r"[ \t\n\r]*")
scan = json.JSONDecoder().raw_decode


def read_batch_json(content: bytes) -> Any:
    """Return what `json.loads` would, with an array for each rollout's tokens, masks and log-probabilities.

    Raises ValueError for what is not valid JSON. A list that does not fit into an array stays a list.
    """
    text = content.decode()
    try:
        value, end = _read(text, _skip(text, 0), LEVELS, "")
    except IndexError as error:
        raise ValueError("the text is not valid JSON") from error
    if _skip(text, end) != len(text):
        raise ValueError(f"the text goes on behind its JSON value, at character {end}")
    return value


def _read(text: str, at: int, levels: int, name: str) -> tuple[Any, int]:
    """Return the value that begins at a position, and where it ends. `name` is the key under which it stands."""
    if levels and text[at] == "[":
        return _read_list(text, at, levels, name)
    if levels and text[at] == "{":
        return _read_object(text, at, levels)
    value, end = scan(text, at)
    return _to_array(value, name), end


def _read_list(text: str, at: int, levels: int, name: str) -> tuple[list[Any], int]:
    values: list[Any] = []
    at = _skip(text, at + 1)
    if text[at] == "]":
        return values, at + 1
    while True:
        value, at = _read(text, at, levels - 1, name)
        values.append(value)
        at = _skip(text, at)
        if text[at] == "]":
            return values, at + 1
        at = _expect(text, at, ",")


def _read_object(text: str, at: int, levels: int) -> tuple[dict[str, Any], int]:
    values: dict[str, Any] = {}
    at = _skip(text, at + 1)
    if text[at] == "}":
        return values, at + 1
    while True:
        if text[at] != '"':
            raise ValueError(f"the text is not valid JSON: a key is missing at character {at}")
        key, at = scan(text, at)
        at = _expect(text, _skip(text, at), ":")
        values[key], at = _read(text, at, levels - 1, key)
        at = _skip(text, at)
        if text[at] == "}":
            return values, at + 1
        at = _expect(text, at, ",")


def _skip(text: str, at: int) -> int:
    match = SPACE.match(text, at)
    return match.end() if match else at


def _expect(text: str, at: int, mark: str) -> int:
    """Return the position behind a mark and the space after it."""
    if text[at] != mark:
        raise ValueError(f"the text is not valid JSON: {mark} is missing at character {at}")
    return _skip(text, at + 1)


def _to_array(value: Any, name: str) -> Any:
    if name not in ARRAYS or not isinstance(value, list):
        return value
    try:
        array = np.asarray(value)
    except (ValueError, OverflowError):
        return value
    fits = array.ndim == 1 and array.dtype.kind in ("i" if ARRAYS[name] is np.int64 else "if")
    return array.astype(ARRAYS[name]) if fits or not value else value
