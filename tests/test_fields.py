"""Edits by name."""

from __future__ import annotations

from typing import Any

import pytest

from lachesis import config as configuration
from lachesis.discovery import Schema
from lachesis.errors import FieldValueError, LockedFieldError, UnknownFieldError
from lachesis.fields import Fields, parse_assignment

SCHEMA = Schema(
    properties={
        "largest": {"type": "integer", "minimum": 1, "maximum": 9, "description": "How large"},
        "mode": {"$ref": "#/$defs/Mode"},
        "group_size": {"type": "integer"},
    },
    definitions={"Mode": {"enum": ["easy", "hard"], "type": "string"}},
    values={"largest": 5, "mode": "easy", "group_size": 99},
)


def test_an_environments_own_fields_stand_beside_the_common_ones() -> None:
    fields = Fields("embedded", SCHEMA)
    assert fields.find("largest").default == 5
    assert fields.find("group_size").default == 16
    assert fields.find("learning_rate").section == "tinker"


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("largest", 10, r"env.largest is 10: .*; allowed: integer, at least 1, at most 9"),
        ("largest", "ten", r"env.largest is 'ten': .*; allowed: integer, at least 1, at most 9"),
        ("mode", "medium", r"env.mode is 'medium': 'medium' is not one of \['easy', 'hard'\]"),
        ("group_size", 1, "allowed: integer, at least 2, at most 1024"),
        ("learning_rate", 0, "tinker.learning_rate is 0: .*; allowed: number, above 0, below 1"),
    ],
)
def test_a_wrong_value_is_refused_with_what_is_allowed(name: str, value: Any, message: str) -> None:
    with pytest.raises(FieldValueError, match=message):
        Fields("embedded", SCHEMA).edit(name, value)


def test_a_locked_field_is_refused_with_its_value_and_reason() -> None:
    current = configuration.resolve("gsm8k", "tinker", {})
    with pytest.raises(LockedFieldError, match=r"env.total_steps is locked at 2500 \(bounds what a run can cost\)") as caught:
        Fields("tinker").edit("total_steps", 5, current)
    assert caught.value.details == {"locked_value": 2500}
    assert Fields("embedded").edit("total_steps", 5)[1] == 5


def test_an_unknown_field_is_refused_with_those_there_are() -> None:
    with pytest.raises(
        UnknownFieldError, match=r"no field 'steps'; fields that can be edited: group_size, batch_size"
    ) as caught:
        Fields("tinker", SCHEMA).edit("steps", 5)
    assert "largest" in caught.value.details["available_fields"]
    assert "total_steps" not in caught.value.details["available_fields"]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a=1", 1),
        ("a=1.5", 1.5),
        ("a=1e-4", 1e-4),
        ("a=true", True),
        ("a=null", None),
        ("a=word", "word"),
        ('a="2024"', "2024"),
    ],
)
def test_assignments_are_read_as_yaml(text: str, value: Any) -> None:
    assert parse_assignment(text) == ("a", value)


@pytest.mark.parametrize("text", ["a", "=1", "a={"])
def test_what_is_no_assignment_is_refused(text: str) -> None:
    with pytest.raises(FieldValueError):
        parse_assignment(text)
