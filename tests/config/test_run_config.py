"""What cannot work cannot be built."""

from pathlib import Path

import pytest
import yaml

from lachesis.base.errors import ConfigError, FieldValueError
from lachesis.config import run_config as run_config
from lachesis.config.field_edits import SECTIONS
from lachesis.config.locked_fields import LOCKS, find_lock
from lachesis.config.profiles import PROFILES, load_profile_values
from lachesis.config.run_config import RunConfig
from tests.harness.locked_values import LOCKED_VALUES


@pytest.mark.parametrize("section", LOCKED_VALUES)
def test_the_cloud_profile_has_the_locked_values_of_the_contract(section):
    values = getattr(run_config.resolve_run_config("gsm8k", "tinker", {}), section).model_dump()
    for name, value in LOCKED_VALUES[section].items():
        assert values[name] == value
        assert find_lock(f"{section}.{name}", "tinker") is not None, name


def test_every_locked_field_is_a_field_and_every_profile_a_profile():
    fields = {
        f"{section}.{name}" for section, model in SECTIONS.items() for name in model.model_fields
    }
    assert set(LOCKS) <= fields | {"slurm", "testing"}
    assert {profile for _, open_on in LOCKS.values() for profile in open_on} <= set(PROFILES)


@pytest.mark.parametrize(
    ("edits", "message"),
    [
        (
            {"env": {"batch_size": 6, "group_size": 4}},
            r"env.batch_size \(6\) is not a multiple of env.group_size \(4\)",
        ),
        (
            {"env": {"batch_size": 4, "group_size": 8}},
            r"env.batch_size \(4\) is not a multiple of env.group_size \(8\)",
        ),
        (
            {"env": {"group_size": 1, "batch_size": 4}},
            r"env.group_size is 1: .*greater than or equal to 2",
        ),
        ({"env": {"max_batches_offpolicy": 0}}, "env.max_batches_offpolicy is 0"),
        ({"env": {"inference_weight": -1}}, "env.inference_weight is -1"),
        ({"env": {"min_batch_allocation": 0.5}}, "env.min_batch_allocation is 0.5"),
        ({"env": {"max_num_workers": 0}}, "env.max_num_workers is 0: no worker"),
        (
            {"env": {"max_token_length": 512}},
            r"env.max_token_length \(512\) is not below tinker.max_token_trainer_length \(512\)",
        ),
        ({"env": {"tokenizer_name": "other"}}, "differ; token ids would mean different texts"),
        ({"env": {"group_size": "many"}}, "env.group_size is 'many'"),
        (
            {"openai": {"base_url": "http://localhost:8001/v1/"}},
            "openai.base_url is 'http://localhost:8001/v1/'",
        ),
        ({"openai": {"base_url": "http://localhost:8001"}}, "openai.base_url"),
        ({"openai": {"api_key": ""}}, "openai.api_key is ''"),
        ({"openai": {"server_type": "openai"}}, "'vllm' or 'sglang'"),
        ({"tinker": {"lora_rank": 0}}, "tinker.lora_rank is 0"),
        ({"tinker": {"typo": 1}}, "tinker.typo is 1: Extra inputs are not permitted"),
    ],
)
def test_an_impossible_configuration_cannot_be_built(edits, message):
    with pytest.raises(FieldValueError, match=message):
        run_config.resolve_run_config("arithmetic", "embedded", edits)


def test_the_yaml_is_one_that_no_environment_can_misread():
    """Two identical endpoints, a non-empty key, an explicit name: see the file's own docstring for
    why.
    """
    config = run_config.resolve_run_config(
        "arithmetic", "embedded", {}, defaults={"largest": 5, "group_size": 99}, model="/models/x"
    )
    content = yaml.safe_load(config.to_yaml())
    assert len(content["openai"]) == 2
    assert content["openai"][0] == content["openai"][1]
    assert content["openai"][0]["api_key"] == "x"
    assert content["env"]["wandb_name"].startswith("arithmetic-")
    assert content["env"]["tokenizer_name"] == content["openai"][0]["model_name"] == "/models/x"
    assert (content["env"]["largest"], content["env"]["group_size"]) == (5, 16)
    assert (content["slurm"], content["testing"]) == (False, False)


def test_a_run_file_is_read_back_as_it_was(tmp_path):
    config = run_config.resolve_run_config(
        "arithmetic", "embedded", {"env": {"group_size": 8}}, defaults={"largest": 5}
    )
    file = tmp_path / "config.yaml"
    file.write_text(config.to_yaml())
    assert RunConfig.from_yaml(file) == config


@pytest.mark.parametrize(
    "content",
    [
        b"\xff\xfe\x00junk",
        b"7",
        b"lachesis: 5",
        b"env: [1]",
        b"env: x",
        b"openai: [7]",
        b"a: 2026-99-99",
        b"a: [",
        b"[" * 5000,
        b"",
    ],
)
def test_a_damaged_run_file_is_named(tmp_path, content):
    (tmp_path / "config.yaml").write_bytes(content)
    with pytest.raises(ConfigError, match=r"config\.yaml"):
        RunConfig.from_yaml(tmp_path / "config.yaml")


def test_an_operator_changes_locked_values_in_one_place(clean_environment):
    (clean_environment / "profiles.yaml").write_text(
        "tinker: {env: {total_steps: 10}, tinker: {lora_rank: 16}}"
    )
    config = run_config.resolve_run_config("gsm8k", "tinker", {})
    assert (config.env.total_steps, config.tinker.lora_rank) == (10, 16)
    (clean_environment / "profiles.yaml").write_text("tinker: 3")
    with pytest.raises(ConfigError, match="must have the form PROFILE"):
        run_config.resolve_run_config("gsm8k", "tinker", {})
    (clean_environment / "profiles.yaml").write_bytes(b"\xff\xfe tinker")
    with pytest.raises(ConfigError, match="must have the form PROFILE"):
        run_config.resolve_run_config("gsm8k", "tinker", {})


def test_profiles_that_cannot_be_read_are_named(clean_environment, monkeypatch):
    """Root may read every file, so the refusal is simulated."""

    def refuse(path, *_, **__):
        raise PermissionError(13, "Permission denied", str(path))

    (clean_environment / "profiles.yaml").write_text("tinker: {}")
    monkeypatch.setattr(Path, "read_text", refuse)
    with pytest.raises(ConfigError, match=r"profiles\.yaml cannot be read: Permission denied"):
        load_profile_values("tinker", clean_environment)


def test_an_unknown_profile_names_those_there_are():
    with pytest.raises(ConfigError, match="no profile 'cloud'; allowed: embedded, tinker, custom"):
        run_config.resolve_run_config("arithmetic", "cloud", {})


@pytest.mark.parametrize("section", SECTIONS.values())
def test_every_number_has_a_bound_on_both_sides(section):
    """A slip of the finger is refused where it is typed."""
    for name, schema in section.model_json_schema()["properties"].items():
        for kind in (schema, *schema.get("anyOf", ())):
            if kind.get("type") in ("integer", "number"):
                assert kind.keys() & {"maximum", "exclusiveMaximum"}, name
                assert kind.keys() & {"minimum", "exclusiveMinimum"}, name


def test_an_absurd_number_of_steps_is_refused():
    values = {"env": {"total_steps": 1180591620717411303424}}
    with pytest.raises(ConfigError, match="total_steps"):
        run_config.resolve_run_config("arithmetic", "embedded", values, model="m")
