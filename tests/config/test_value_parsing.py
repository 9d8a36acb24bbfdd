"""Texts become what their fields' schemas say, and nothing else."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lachesis.config.value_parsing import read_typed_value, read_untyped

DEFINITIONS = {
    "Mode": {"enum": ["easy", "hard"], "type": "string"},
    "Level": {"enum": [1, 2, True, None]},
}


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "1", "1"),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, "5", 5),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, "5th", "5th"),
        ({"anyOf": [{"type": "string"}, {"type": "number"}]}, "nan", "nan"),
        ({"type": ["string", "null"]}, "null", None),
        ({"$ref": "#/$defs/Mode"}, "hard", "hard"),
        ({"$ref": "#/$defs/Mode"}, "soft", "soft"),
        ({"allOf": [{"$ref": "#/$defs/Level"}]}, "2", 2),
        ({"$ref": "#/$defs/Level"}, "True", True),
        ({"$ref": "#/$defs/Level"}, "null", None),
        ({"const": 3}, "3", 3),
        (
            {"type": "array", "items": {"type": "string"}},
            "[on, 1, 2026-01-01, 'x y']",
            ["on", "1", "2026-01-01", "x y"],
        ),
        ({"type": "array", "items": {"type": "integer"}}, "[1, 2]", [1, 2]),
        ({"type": "array"}, '[1, "1", on, .5]', [1, "1", "on", 0.5]),
        ({"type": "array"}, '[1, "1", true]', [1, "1", True]),
        ({"type": "array"}, "a, b", "a, b"),
        ({"type": "array"}, "[", "["),
        ({"type": "array"}, "{a: 1}", "{a: 1}"),
        (
            {"type": "object", "additionalProperties": {"type": "string"}},
            "{a: 1, 2: null}",
            {"a": "1", "2": "null"},
        ),
        (
            {"type": "object", "properties": {"a": {"type": "integer"}}},
            "{a: 1_000, b: no}",
            {"a": 1000, "b": "no"},
        ),
        ({"type": "object", "additionalProperties": False}, "{b: 1}", {"b": 1}),
        (
            {"anyOf": [{"type": "array", "items": {"type": "integer"}}, {"type": "null"}]},
            "[3]",
            [3],
        ),
        ({}, "[1, NaN, {a: '2'}]", [1, "NaN", {"a": "2"}]),
        ({}, "[broken", "[broken"),
        ({}, "word", "word"),
        ({}, "12", 12),
        ({"type": "new-type"}, "12", 12),
        ({"type": "integer"}, "1.5", "1.5"),
        ({"type": "boolean"}, "2", "2"),
    ],
)
def test_a_text_is_read_by_its_schema(schema, text, value):
    read = read_typed_value(schema, text, DEFINITIONS)
    assert (read, repr(read)) == (value, repr(value))


@pytest.mark.parametrize(
    ("schema", "value", "read"),
    [
        ({"type": "string"}, 5, 5),
        ({"type": "array", "items": {"type": "integer"}}, ["1", 2], [1, 2]),
        ({"type": "array", "items": {}}, ["1", 2], ["1", 2]),
        ({"type": "object"}, {"a": {"b": "1"}}, {"a": {"b": "1"}}),
        ({"type": "integer"}, {"a": "1"}, {"a": "1"}),
        ({"type": "integer"}, ["1"], ["1"]),
    ],
)
def test_a_value_that_is_no_text_stays_and_its_texts_are_read(schema, value, read):
    assert read_typed_value(schema, value, {}) == read


@given(number=st.floats(allow_nan=False, allow_infinity=False))
def test_numbers_round_trip(number):
    assert read_typed_value({"type": "number"}, repr(number), {}) == number
    assert read_untyped(repr(number)) == number


@given(number=st.integers())
def test_integers_round_trip(number):
    assert read_typed_value({"type": "integer"}, str(number), {}) == number
    assert read_untyped(str(number)) == number


@given(text=st.text())
def test_any_text_is_a_text_and_no_text_breaks_another_type(text):
    assert read_typed_value({"type": "string"}, text, {}) == text
    for kind in ("integer", "number", "boolean", "null", "array", "object"):
        read_typed_value({"type": kind}, text, {})
    read_untyped(text)
