"""Which base model and which examples a launch takes, and which it refuses."""

import json
import os
import shlex
from pathlib import Path

import pytest

from lachesis.agent_tools import launches
from lachesis.agent_tools.draft import edit_draft, select_environment
from lachesis.agent_tools.launches import start_draft
from lachesis.base.errors import (
    ConfigError,
    FieldValueError,
    LockedFieldError,
    ModelNotFoundError,
    ServerDownError,
)
from lachesis.cli.main import main
from lachesis.config import run_config as run_config
from lachesis.config.launch_spec import LaunchSpec, TestSpec
from lachesis.config.run_config import RunConfig
from lachesis.launch import choose_model
from lachesis.operations.inference_tests import check_test
from lachesis.operations.launches import describe_launch, preview_launch
from lachesis.runs.store import RunStore
from lachesis.supervision.services.ports import reserve_free_ports
from lachesis.tiny_model import build
from lachesis.trainer import sft
from lachesis.trainer.__main__ import parse_args, read_config


def taught(home, name, digest="0123abcd"):
    """A folder as `lachesis model build --for NAME` leaves it."""
    folder = home / "models" / f"tiny-{name}-{digest}"
    folder.mkdir(parents=True)
    for file in ("config.json", "tokenizer.json", "model.safetensors"):
        (folder / file).write_text("{}")
    return folder


def test_an_environment_that_the_tiny_model_does_not_know_is_not_trained_in_silence(own, refused):
    for command in ("train", "test"):
        answer = refused(command, "own.py")
        assert answer["code"] == "config"
        assert "the tiny model knows sums only" in answer["error"]
        assert f"`lachesis model build --for {own}`" in answer["error"]
        assert "--model FOLDER_OR_NAME" in answer["error"]


@pytest.mark.timeout(600)
def test_the_command_that_the_refusal_names_helps(own, refused, capsys):
    command = refused("train", "own.py")["error"].split("`")[1]
    assert main([*shlex.split(command)[1:], "--steps", "1", "--json"]) == 0
    built = json.loads(capsys.readouterr().out)["path"]
    assert main(["train", "own.py"]) == 1
    said = capsys.readouterr().err
    assert "server_down" in said, "everything that is checked before the server is asked has passed"
    home = Path(os.environ["LACHESIS_HOME"])
    assert find_default_model("own", home=home) == built


@pytest.mark.parametrize("model", ["tiny", "embedded:tiny"])
def test_the_model_of_sums_is_taken_where_it_is_named(own, refused, model):
    assert refused("train", "own.py", "--model", model)["code"] == "server_down"
    assert refused("test", "own.py", "--model", model)["code"] == "server_down"


def test_without_a_server_nothing_is_built(refused, monkeypatch):
    for command in ("train", "test"):
        answer = refused(command, "arithmetic")
        assert answer["code"] == "server_down"
        assert "`lachesis serve`" in answer["error"]
        monkeypatch.setenv("PREFECT_API_URL", f"http://127.0.0.1:{reserve_free_ports(1)[0]}/api")
        answer = refused(command, "arithmetic")
        assert answer["code"] == "server_down", "one is known and does not answer"
        monkeypatch.delenv("PREFECT_API_URL")
    assert not (Path(os.environ["LACHESIS_HOME"]) / "models").exists()


def find_default_model(environment, *others, home, profile="embedded"):
    spec = LaunchSpec(environment=environment, profile=profile)
    return choose_model.find_base_model(spec, environment, others, fork_source=None, home=home)


def test_the_default_is_the_newest_model_that_was_taught_on_these_environments(tmp_path):
    def default(*environments):
        return find_default_model(*environments, home=tmp_path)

    sums = str(build.get_tiny_model_path(build.TinyModelRecipe(), tmp_path))
    assert default("own") == default("arithmetic") == sums
    older, newer = taught(tmp_path, "own"), taught(tmp_path, "own", "89abcdef")
    os.utime(older, (1, 1))
    other = taught(tmp_path, "own-other")
    taught(tmp_path, "arithmetic")
    assert default("own") == str(newer)
    assert default("own", "other") == str(other)
    assert default("other") == default("arithmetic") == sums
    assert find_default_model("own", profile="tinker", home=tmp_path) is None
    assert choose_model.describe_default_model(LaunchSpec(environment="own"), str(newer)) == (
        f"no model is named, so the one taught on own is used: {newer}"
    )
    named = LaunchSpec(environment="own", model=str(newer))
    assert choose_model.describe_default_model(named, str(newer)) is None
    assert choose_model.describe_default_model(LaunchSpec(environment="arithmetic"), sums) is None


def test_an_agent_is_told_when_it_selects(own, monkeypatch):
    from lachesis.agent_tools.session import AgentSession

    monkeypatch.setenv("LACHESIS_ENVIRONMENTS", str(own.parent))
    desk = AgentSession("s")
    assert "knows sums only" in str(select_environment(desk, "own")["warning"])
    assert "knows sums only" in str(launches.preview_start(desk)["problem"])
    with pytest.raises(ConfigError, match="`lachesis model build --for own`"):
        start_draft(desk)
    taught(desk.store.home, "own")
    assert "warning" not in select_environment(desk, "own")
    with pytest.raises(ServerDownError):
        start_draft(desk)


def test_a_model_that_is_nowhere_is_refused_before_anything_is_submitted(refused, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for command in ("train", "test"):
        answer = refused(command, "arithmetic", "--model", "Qwen/DoesNotExist")
        assert answer["code"] == "model_not_found"
        assert answer["error"].startswith("the model Qwen/DoesNotExist is not on this machine")
    assert "--endpoint-model NAME" in answer["error"]
    assert not (Path(os.environ["LACHESIS_HOME"]) / "runs").exists()


def test_a_cloud_profile_needs_the_tokenizer_of_its_model(refused, monkeypatch, random_model):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("TINKER_API_KEY", "tml-x")
    cloud = ("train", "arithmetic", "--profile", "tinker")
    assert refused(*cloud)["code"] == "model_not_found"
    assert refused(*cloud, "--model", random_model)["code"] == "validation_missing"
    started = refused(*cloud, "--model", random_model, "--without-validation")
    assert started["code"] == "server_down"


def test_a_name_in_a_test_means_what_it_means_in_train(random_model, monkeypatch):
    """Also for the forecast, which is for the run that `train` would make."""
    seen: list[TestSpec] = []

    def check(store, spec):
        seen.append(spec)
        raise ServerDownError("enough")

    monkeypatch.setattr("lachesis.cli.commands.inference_tests.check_test", check)

    def asked(*words):
        assert main(["test", "arithmetic", *words]) == 1
        spec = seen.pop()
        return spec.model, spec.models

    assert asked("--model", "Qwen/Qwen3-0.6B") == ("Qwen/Qwen3-0.6B", ["embedded:Qwen/Qwen3-0.6B"])
    assert asked("--model", random_model) == (random_model, [f"embedded:{random_model}"])
    assert asked("--model", "embedded:tiny") == ("tiny", ["embedded:tiny"])
    assert asked("--endpoint-model", "qwen/qwen3-8b") == (None, ["qwen/qwen3-8b"])
    assert asked("--model", "a/b", "--model", "tiny") == (None, ["embedded:a/b", "embedded:tiny"])
    assert asked() == (None, None)
    cloud = ("--profile", "tinker", "--model")
    assert asked(*cloud, "Qwen/Qwen3-8B") == ("Qwen/Qwen3-8B", ["tinker:Qwen/Qwen3-8B"])
    assert asked(*cloud[:2], "--endpoint-model", "a/b") == (None, ["a/b"])
    assert asked(*cloud, random_model) == (None, [f"embedded:{random_model}"])


def test_models_at_an_endpoint_keep_the_names_of_the_contract():
    store = RunStore()
    with pytest.raises(Exception, match="OPENROUTER_API_KEY"):
        check_test(store, TestSpec(environment="arithmetic", models=["qwen/qwen3-8b"]))
    with pytest.raises(ModelNotFoundError, match="is not a model"):
        check_test(store, TestSpec(environment="arithmetic", models=["embedded:/nowhere"]))


# --- examples to imitate
# ----------------------------------------------------------------------------------------------


def test_the_owner_sets_the_file_of_examples_and_an_agent_does_not(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "FILE.jsonl"
    file.write_text('{"prompt": "2+3=", "completion": "5"}\n')
    store = RunStore()
    for profile in ("embedded", "tinker"):
        spec = LaunchSpec(
            environment="arithmetic", profile=profile, settings={"sft_file": "FILE.jsonl"}
        )
        preview = preview_launch(store, spec)
        config, plan = preview.launch.config, preview.plan
        assert config.tinker.sft_file == str(file), "the trainer runs in another folder"
        written = tmp_path / f"{profile}.yaml"
        written.write_text(plan.config.to_yaml())
        read_by_trainer = read_config(parse_args(["--config", str(written)])).tinker.sft_file
        assert (
            len(
                sft.read_examples(
                    Path(str(read_by_trainer)), build.build_tokenizer(), max_tokens=99
                )
            )
            == 1
        )
        with pytest.raises(LockedFieldError, match=r"tinker.sft_file is locked .*an agent may not"):
            preview_launch(store, spec.model_copy(update={"by_agent": True}))
    described = describe_launch(store, LaunchSpec(environment="arithmetic"))
    assert [field["locked"] for field in described["fields"] if field["name"] == "sft_file"] == [
        None
    ]


def test_an_agent_cannot_name_a_file(own):
    from lachesis.agent_tools.session import AgentSession

    desk = AgentSession("s")
    select_environment(desk, "arithmetic")
    for field in ("sft_file", "tinker.sft_file"):
        with pytest.raises(LockedFieldError):
            edit_draft(desk, field, str(own))


@pytest.mark.parametrize("name", ["absent.jsonl", ".", "~nobody/x", "a\nb"])
def test_a_file_that_cannot_be_read_is_refused(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FieldValueError, match="allowed: a readable JSONL file"):
        choose_model.resolve_examples_file(name)


def test_an_edit_of_an_older_session_is_read_by_its_type():
    """What is kept of a draft may be a text where a number is meant."""
    settings = {"env.total_steps": "7", "largest": "5"}
    spec = LaunchSpec(environment="arithmetic", settings=settings)
    config = preview_launch(RunStore(), spec).launch.config
    assert isinstance(config, RunConfig)
    assert (config.env.total_steps, config.env.model_extra["largest"]) == (7, 5)  # type: ignore[index]
