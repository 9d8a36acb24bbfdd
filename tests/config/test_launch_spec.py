"""The parameters of a flow run describe a launch, and a launch describes them again."""

import pytest

from lachesis.base.errors import ArgumentsError, FieldValueError, LachesisError
from lachesis.config.launch_spec import TestSpec, format_settings, parse_settings, read_spec
from lachesis.prefect_client.runs_from_prefect import find_or_create_run
from lachesis.prefect_client.submit import list_parameters
from lachesis.runs.store import RunStore
from tests.harness.hostile_inputs import BAD_INPUTS


@pytest.mark.parametrize(
    "values",
    [
        {"group_size": 8, "tinker.use_wandb": False, "limits.max_hours": None},
        {"prompt": "two\nlines", "other": " a blank before\n\nand an empty line\n"},
        {"env.mixture": {"calm": {"weight": 2.5}}, "list": [1, "two"]},
        {"equals": "a=b", "hash": "# no comment"},
    ],
)
def test_settings_are_read_as_they_were_written(values):
    read = parse_settings(format_settings(values))
    assert set(read) == set(values)
    for name, value in values.items():
        if isinstance(value, str):
            assert read[name] == value


def test_settings_of_a_person_may_have_empty_lines_and_comments():
    text = "\n# small\ngroup_size = 8\n\nprompt=one\n  two\n"
    assert parse_settings(text) == {"group_size": " 8", "prompt": "one\n two"}


def test_an_error_in_settings_names_the_line():
    with pytest.raises(FieldValueError, match=r"settings, line 3: 'group_size 8' is not an"):
        parse_settings("a=1\n\ngroup_size 8")


def test_a_launch_is_described_by_the_parameters_that_make_it_again(tmp_path, monkeypatch):
    """A copy in Prefect starts with the same configuration, apart from what the owner alone may."""
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    store = RunStore()
    values = {
        "environment": "arithmetic",
        "steps": 20,
        "seed": 7,
        "settings": "group_size=8\nbatch_size=64\ntinker.learning_rate=0.002",
        "limits": {"max_hours": 1.5},
    }
    first = find_or_create_run(store, values, None)
    assert list_parameters(first) == {
        **values,
        "profile": "embedded",
        "settings": "env.batch_size=64\nenv.group_size=8\ntinker.learning_rate=0.002",
        "run_id": first.run_id,
    }
    copy = {name: value for name, value in list_parameters(first).items() if name != "run_id"}
    second = find_or_create_run(store, copy, None)
    assert second.run_id != first.run_id
    folders = [store.dir(record.run_id) for record in (first, second)]
    configs = [
        [line for line in folder.config.read_text().splitlines() if "wandb_name" not in line]
        for folder in folders
    ]
    assert configs[0] == configs[1]


def test_parameters_of_a_test_describe_its_options():
    values = {"environment": "arithmetic", "models": ["embedded:tiny"], "steps": 2}
    spec = read_spec(TestSpec, values)
    assert spec.models == ["embedded:tiny"]
    assert (spec.num_groups, spec.group_size) == (2, 16)
    with pytest.raises(ArgumentsError, match="group_size is 0; allowed: integer, at least 1"):
        read_spec(TestSpec, {**values, "group_size": 0})


@pytest.mark.parametrize("bad", BAD_INPUTS, ids=lambda bad: bad.name)
def test_a_flow_refuses_a_bad_input_by_a_sentence(bad, monkeypatch):
    """A schedule is not checked by the server, so the flow checks everything again."""
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    store = RunStore()
    with pytest.raises(LachesisError) as raised:
        find_or_create_run(store, bad.parameters, None)
    for word in bad.words:
        assert word in str(raised.value)
    assert store.all() == []
