"""Edits by name."""

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lachesis.base.errors import ConfigError, FieldValueError, LockedFieldError, UnknownFieldError
from lachesis.base.files import write_private
from lachesis.config import run_config as run_config
from lachesis.config.field_edits import ConfigFields, get_editable_values, replace_limits
from lachesis.config.launch_spec import parse_assignment
from lachesis.config.run_config import RunConfig
from lachesis.environment_catalog.lookup import EnvironmentSchema
from tests.harness.command_line import parse_command

SCHEMA = EnvironmentSchema(
    properties={
        "largest": {"type": "integer", "minimum": 1, "maximum": 9, "description": "How large"},
        "mode": {"$ref": "#/$defs/Mode"},
        "group_size": {"type": "integer"},
    },
    definitions={"Mode": {"enum": ["easy", "hard"], "type": "string"}},
    values={"largest": 5, "mode": "easy", "group_size": 99},
)


def test_an_environments_own_fields_stand_beside_the_common_ones():
    fields = ConfigFields("embedded", SCHEMA)
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
def test_a_wrong_value_is_refused_with_what_is_allowed(name, value, message):
    with pytest.raises(FieldValueError, match=message):
        ConfigFields("embedded", SCHEMA).check_edit(name, value)


def test_a_locked_field_is_refused_with_its_value_and_reason():
    current = run_config.resolve_run_config("gsm8k", "tinker", {})
    with pytest.raises(
        LockedFieldError, match=r"env.total_steps is locked at 2500 \(limits what a run can cost\)"
    ) as caught:
        ConfigFields("tinker").check_edit("total_steps", 5, current)
    assert caught.value.details == {"locked_value": 2500}
    assert ConfigFields("embedded").check_edit("total_steps", 5)[1] == 5


def test_an_unknown_field_is_refused_with_those_there_are():
    with pytest.raises(
        UnknownFieldError,
        match=r"no field 'steps'; fields that can be edited: group_size, batch_size",
    ) as caught:
        ConfigFields("tinker", SCHEMA).check_edit("steps", 5)
    assert "largest" in caught.value.details["available_fields"]
    assert "total_steps" not in caught.value.details["available_fields"]


@pytest.mark.parametrize("name", ["lerning_rate", "tinker.learningrate"])
def test_a_misspelled_field_is_answered_with_the_nearest_one(name):
    with pytest.raises(UnknownFieldError, match="; did you mean learning_rate; fields that can"):
        ConfigFields("embedded", SCHEMA).check_edit(name, 1)


@pytest.mark.parametrize("text", ["a", "=1", " =1", ""])
def test_what_is_no_assignment_is_refused(text):
    with pytest.raises(FieldValueError, match="is not an assignment; allowed: field=value"):
        parse_assignment(text)


TEXT_FIELD = EnvironmentSchema(
    properties={"label": {"type": "string"}}, definitions={}, values={"label": "x"}
)


@pytest.mark.parametrize(
    "text",
    ["nan", "on", "1_000", "2026-01-01", "null", "1e-4", '"2024"', "a: b", "[", "a=b", " a ", ""],
)
def test_a_text_field_gets_the_text_as_it_was_typed(text):
    name, value = parse_assignment(f"label={text}")
    assert ConfigFields("embedded", TEXT_FIELD).check_edit(name, value)[1] == text
    assert ConfigFields("embedded").check_edit("wandb_project", text or "p")[1] == (text or "p")


@pytest.mark.parametrize("text", ["nan", "on", "1_000", "2026-01-01"])
def test_a_text_field_that_may_be_null_gets_the_text_too(text):
    assert ConfigFields("embedded").check_edit("wandb_name", text)[1] == text
    assert ConfigFields("embedded").check_edit("wandb_name", "null")[1] is None


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("total_steps", "1_000", 1000),
        ("total_steps", "1e3", 1000),
        ("learning_rate", "1e-4", 1e-4),
        ("final_evaluation", "off", False),
        ("tinker.use_wandb", "TRUE", True),
        ("max_tokens", "null", None),
        ("max_tokens", "5", 5),
        ("max_hours", "None", None),
        ("loss_fn", "ppo", "ppo"),
        ("mode", "hard", "hard"),
        ("largest", "7", 7),
        (
            "mixture",
            "{reverse_text: {weight: 0.5, label: on}}",
            {"reverse_text": {"weight": 0.5, "label": "on"}},
        ),
        ("mixture", '{"reverse_text": {"label": "2024"}}', {"reverse_text": {"label": "2024"}}),
    ],
)
def test_other_fields_read_a_text_as_their_type(name, text, value):
    read = ConfigFields("embedded", SCHEMA).check_edit(name, text)[1]
    assert read == value
    assert type(read) is type(value)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (
            "total_steps",
            "many",
            "env.total_steps is 'many': 'many' is not of type 'integer'; allowed: integer, at "
            "least 1",
        ),
        ("total_steps", "1.5", "'1.5' is not of type 'integer'"),
        (
            "learning_rate",
            "nan",
            "tinker.learning_rate is 'nan': 'nan' is not of type 'number'; allowed: number, above "
            "0",
        ),
        ("learning_rate", "inf", "is not of type 'number'"),
        (
            "tinker.use_wandb",
            "maybe",
            "'maybe' is not valid under any of the given schemas; allowed: boolean or null",
        ),
        (
            "max_tokens",
            "lots",
            "limits.max_tokens is .lots.: .*; allowed: integer, at least 1, at most 1000000000000 "
            "or null",
        ),
        ("mixture", "a, b", "'a, b' is not of type 'object'; allowed: object"),
        ("wandb_name", "a\x00b", "it has control characters"),
        ("wandb_project", "a\udc80", "it is not Unicode text"),
        ("wandb_project", "a" * 10_001, "it has more than 10000 characters"),
        ("largest", float("nan"), "it is not a finite number"),
        ("mixture", {"a": {"b": [float("inf")]}}, "it is not a finite number"),
    ],
)
def test_a_text_that_is_not_of_the_type_is_refused_with_what_is_allowed(name, text, message):
    with pytest.raises(FieldValueError, match=message):
        ConfigFields("embedded", SCHEMA).check_edit(name, text)


texts = st.text(
    st.characters(
        exclude_categories=["Cs"],
        exclude_characters=[chr(code) for code in range(32) if chr(code) not in "\n\t"],
    ),
    max_size=50,
)


@given(text=texts)
@example("\u2028\x85\ufeff")
@example("=")
def test_any_text_reaches_a_text_field_through_command_line_and_file(
    tmp_path_factory: Any, text: str
) -> None:
    args = parse_command(["train", "arithmetic", "--set", f"label={text}"])
    ((name, typed),) = [parse_assignment(edit) for edit in args.edits]
    field, value = ConfigFields("embedded", TEXT_FIELD).check_edit(name, typed)
    assert value == text
    config = run_config.resolve_run_config(
        "arithmetic", "embedded", {field.section: {field.name: value}}
    )
    assert _through_file(tmp_path_factory, config).env.model_extra == {"label": text}
    assert ConfigFields("embedded", TEXT_FIELD).check_edit(name, value)[1] == text, (
        "an edit that is repeated changes nothing"
    )


def _through_file(tmp_path_factory, config):
    file = tmp_path_factory.mktemp("run") / "config.yaml"
    write_private(file, config.to_yaml())
    return RunConfig.from_yaml(file)


def test_the_words_of_an_environments_types():
    kinds = {
        "one": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "two": {"oneOf": [{"enum": ["a", "b"]}, {"const": 3}]},
        "three": {"anyOf": [{"$ref": "#/$defs/Other"}, {"type": "null"}]},
        "four": {},
    }
    schema = EnvironmentSchema(properties=kinds, definitions={}, values={})
    fields = ConfigFields("embedded", schema)
    assert [fields.find(name).type for name in kinds] == [
        "integer | null",
        "a | b | 3",
        "Other | null",
        "any",
    ]


def test_only_limits_are_set_on_a_run_that_is_resumed():
    config = run_config.resolve_run_config("a", "embedded", {})
    changed = replace_limits(config, {"max_tokens": "5", "limits.on_stall": "stop"})
    assert (changed.limits.max_tokens, changed.limits.on_stall) == (5, "stop")
    assert "total_steps" in get_editable_values(config)
    with pytest.raises(
        FieldValueError, match="allowed: integer, at least 1, at most 1000000000000 or null"
    ):
        replace_limits(config, {"max_tokens": "0"})
    with pytest.raises(
        ConfigError,
        match=r"'learning_rate' cannot be .*: limits\.max_hours, .*, env\.total_steps; begin anew",
    ):
        replace_limits(config, {"learning_rate": "1e-4"}, hint="; begin anew")


def test_what_is_locked_for_agents_is_open_to_the_owner():
    assert ConfigFields("tinker", is_owner=True).check_edit("sft_file", "a.jsonl")[1] == "a.jsonl"
    steps = ConfigFields("tinker", is_owner=True).find("total_steps")
    assert (steps.lock_reason, steps.agent_lock_reason) == (None, "limits what a run can cost")
    with pytest.raises(LockedFieldError, match="set by the profile or for each run"):
        ConfigFields("tinker", is_owner=True).check_edit("rollout_server_url", "http://a")
    with pytest.raises(LockedFieldError, match="limits what a run can cost"):
        ConfigFields("tinker").check_edit("total_steps", 60)
    with pytest.raises(LockedFieldError, match="an agent may not"):
        ConfigFields("embedded").check_edit("sft_file", "a.jsonl")
