"""Names of earlier releases are accepted, each with a warning that says the new name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from lachesis.base.errors import WeightSyncError
from lachesis.base.json_text import Json, error_to_payload
from lachesis.base.renamed import RenamedWarning
from lachesis.base.renamed_fields import RENAMED_FIELDS, RenamedField
from lachesis.base.secrets import read_passed_variables
from lachesis.catalog import describe
from lachesis.config.edits import ConfigFields, replace_limits
from lachesis.config.run_config import RunConfig, resolve_run_config
from lachesis.environment.task_config import TaskEnvConfig

UPGRADING = Path(__file__).resolve().parents[2] / "docs" / "upgrading.md"
OLD_VALUES: dict[str, object] = {
    "weight_by": "sequence",
    "cut_rollouts": "leave_out",
    "supervised_file": "/examples.jsonl",
    "supervised_epochs": 3,
    "supervised_batch_size": 5,
    "supervised_learning_rate": 0.5,
    "on_broken": "stop",
    "most_held_out": 7,
    "verifier_timeout": 4.5,
}
OWN_FIELDS = [renamed for renamed in RENAMED_FIELDS if renamed.section != "env"]
ENVIRONMENT_FIELDS = [renamed for renamed in RENAMED_FIELDS if renamed.section == "env"]


def get_new_value(renamed: RenamedField) -> object:
    return renamed.translate_value(OLD_VALUES[renamed.old_name])


@pytest.mark.parametrize("renamed", OWN_FIELDS, ids=lambda renamed: renamed.old_name)
def test_an_old_name_in_a_file_is_read_and_the_new_one_is_written(
    renamed: RenamedField, tmp_path: Path
) -> None:
    content = yaml.safe_load(resolve_run_config("arithmetic", "embedded", {}).to_yaml())
    del content[renamed.section][renamed.new_name]
    content[renamed.section][renamed.old_name] = OLD_VALUES[renamed.old_name]
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(content))
    with pytest.warns(RenamedWarning, match=f"{renamed.old_name} is now called {renamed.new_name}"):
        config = RunConfig.from_yaml(file)
    assert getattr(getattr(config, renamed.section), renamed.new_name) == get_new_value(renamed)
    assert renamed.old_name not in config.to_yaml()


@pytest.mark.parametrize("renamed", OWN_FIELDS, ids=lambda renamed: renamed.old_name)
@pytest.mark.parametrize("has_section", [False, True])
def test_an_old_name_can_be_edited(renamed: RenamedField, has_section: bool) -> None:
    name = f"{renamed.section}.{renamed.old_name}" if has_section else renamed.old_name
    fields = ConfigFields("embedded", is_owner=True)
    with pytest.warns(RenamedWarning, match=renamed.new_name):
        field, value = fields.check_edit(name, OLD_VALUES[renamed.old_name])
    assert (field.section, field.name) == (renamed.section, renamed.new_name)
    assert value == get_new_value(renamed)


@pytest.mark.parametrize("renamed", ENVIRONMENT_FIELDS, ids=lambda renamed: renamed.old_name)
def test_fields_of_our_environments_have_both_names(renamed: RenamedField) -> None:
    old_value = OLD_VALUES[renamed.old_name]
    with pytest.warns(RenamedWarning, match=renamed.new_name):
        config = TaskEnvConfig.model_validate({renamed.old_name: old_value})
    assert getattr(config, renamed.new_name) == old_value
    with pytest.warns(RenamedWarning, match=renamed.new_name):
        assert getattr(config, renamed.old_name) == old_value
    schema = describe.load_schema(describe.find_environment("reverse_text"))
    with pytest.warns(RenamedWarning, match=renamed.new_name):
        field, value = ConfigFields("embedded", schema).check_edit(renamed.old_name, old_value)
    assert (field.name, value) == (renamed.new_name, old_value)


def test_a_field_given_by_both_names_has_the_value_of_the_new_one() -> None:
    edits: dict[str, Json] = {"tinker": {"weight_by": "sequence", "loss_aggregation": "token_mean"}}
    with pytest.warns(RenamedWarning):
        config = resolve_run_config("arithmetic", "embedded", edits)
    assert config.tinker.loss_aggregation == "token_mean"


def test_a_resumed_run_takes_new_limits_by_their_old_name() -> None:
    config = resolve_run_config("arithmetic", "embedded", {})
    with pytest.warns(RenamedWarning):
        changed = replace_limits(config, {"on_broken": "stop"})
    assert changed.limits.on_learning_failure == "stop"


def test_old_variables_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LACHESIS_PASS", "WIKI_*")
    monkeypatch.setenv("WIKI_DIR", "/wiki")
    with pytest.warns(RenamedWarning, match="LACHESIS_ENVIRONMENT_VARIABLES"):
        assert read_passed_variables() == {"WIKI_DIR": "/wiki"}


def test_an_old_command_works_and_a_note_says_its_new_name() -> None:
    command = [sys.executable, "-m", "lachesis.cli.main", "notices", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "lachesis notifications" in done.stdout
    assert "--webhook" in done.stdout
    assert done.stderr == (
        "note: lachesis notices is now called lachesis notifications; the old name still works\n"
    )


def test_an_error_with_a_new_code_has_its_former_one_too() -> None:
    payload = error_to_payload(WeightSyncError("they differ"))
    assert (payload["code"], payload["former_code"]) == ("weight_sync", "canary")


def test_the_page_about_upgrades_names_every_field() -> None:
    page = UPGRADING.read_text()
    for renamed in RENAMED_FIELDS:
        row = f"| `{renamed.section}.{renamed.old_name}` | `{renamed.section}.{renamed.new_name}` |"
        assert row in page, row
        for old_value, new_value in renamed.values.items():
            assert f"`{old_value}` → `{new_value}`" in page
