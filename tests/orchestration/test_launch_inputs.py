"""Which model and which file a launch takes, and what is refused before anything is submitted."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lachesis.agent import previews
from lachesis.base.errors import (
    CheckpointError,
    ConfigError,
    FieldValueError,
    LockedFieldError,
    ModelNotFoundError,
    ServerDownError,
)
from lachesis.cli.main import main
from lachesis.config import run_config as run_config
from lachesis.config.run_config import RunConfig
from lachesis.orchestration import launch_inputs
from lachesis.orchestration.launch_inputs import LaunchRequest
from lachesis.runs.checkpoints import Checkpoints
from lachesis.runs.run_record import RunRecord
from lachesis.service import LachesisService
from lachesis.supervision.process import reserve_free_ports
from lachesis.tiny_model import build
from lachesis.trainer import sft_examples
from lachesis.trainer.__main__ import parse_args, read_config
from lachesis.validation.inference_tests import TestOptions
from tests.runs.test_checkpoints import save

Refused = Callable[..., Any]
OWN = '''"""Sums by another name."""

from lachesis.environment import TaskEnv


class Own(TaskEnv):
    """Say the word again."""

    name = "own"

    def load_dataset(self):
        return [{"question": word} for word in ("stressed", "drawer", "live", "parts", "loop")]

    def score_answer(self, item, answer):
        return float(answer.strip() == item["question"])

    def gold(self, item):
        return item["question"]

    def corrupt(self, item):
        return item["question"] + "!"
'''


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the environment `own`."""
    folder = tmp_path_factory.mktemp("shared")
    (folder / "mine").mkdir()
    (folder / "mine" / "own.py").write_text(OWN)
    return folder


@pytest.fixture(autouse=True)
def home(clean_environment: Path) -> Path:
    return clean_environment


@pytest.fixture
def own(shared: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file with an environment that no model of this home knows."""
    monkeypatch.setenv("LACHESIS_ENVIRONMENTS", "")  # a command that is given the file adds it
    monkeypatch.chdir(shared / "mine")
    return shared / "mine" / "own.py"


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Refused:
    """Run a command that must fail; its error."""

    def run(*words: str) -> Any:
        assert main([*words, "--json"]) == 1
        answer = json.loads(capsys.readouterr().out)
        assert "\n" not in answer["error"]
        return answer

    return run


def taught(home: Path, name: str, digest: str = "0123abcd") -> Path:
    """A folder as `lachesis model build --for NAME` leaves it."""
    folder = home / "models" / f"tiny-{name}-{digest}"
    folder.mkdir(parents=True)
    for file in ("config.json", "tokenizer.json", "model.safetensors"):
        (folder / file).write_text("{}")
    return folder


def test_an_environment_that_the_tiny_model_does_not_know_is_not_trained_in_silence(
    own: Path, refused: Refused
) -> None:
    for command in ("train", "test"):
        answer = refused(command, "own.py")
        assert answer["code"] == "config"
        assert "the tiny model knows sums only" in answer["error"]
        assert f"`lachesis model build --for {own}`" in answer["error"]
        assert "--model FOLDER_OR_NAME" in answer["error"]


@pytest.mark.timeout(600)
def test_the_command_that_the_refusal_names_helps(
    own: Path, refused: Refused, capsys: pytest.CaptureFixture[str]
) -> None:
    command = refused("train", "own.py")["error"].split("`")[1]
    assert main([*shlex.split(command)[1:], "--steps", "1", "--json"]) == 0
    built = json.loads(capsys.readouterr().out)["path"]
    assert main(["train", "own.py"]) == 1
    said = capsys.readouterr().err
    assert "server_down" in said, "everything that is checked before the server is asked has passed"
    home = Path(os.environ["LACHESIS_HOME"])
    assert launch_inputs.find_base_model(LaunchRequest("own"), [], None, home) == built


@pytest.mark.parametrize("model", ["tiny", "embedded:tiny"])
def test_the_model_of_sums_is_taken_where_it_is_named(
    own: Path, refused: Refused, model: str
) -> None:
    assert refused("train", "own.py", "--model", model)["code"] == "server_down"
    assert refused("test", "own.py", "--model", model)["code"] == "server_down"


def test_without_a_server_nothing_is_built(
    refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    for command in ("train", "test"):
        answer = refused(command, "arithmetic")
        assert answer["code"] == "server_down"
        assert "`lachesis serve`" in answer["error"]
        monkeypatch.setenv("PREFECT_API_URL", f"http://127.0.0.1:{reserve_free_ports(1)[0]}/api")
        answer = refused(command, "arithmetic")
        assert answer["code"] == "server_down", "one is known and does not answer"
        monkeypatch.delenv("PREFECT_API_URL")
    assert not (Path(os.environ["LACHESIS_HOME"]) / "models").exists()


def test_the_default_is_the_newest_model_that_was_taught_on_these_environments(
    tmp_path: Path,
) -> None:
    def default(*environments: str) -> str | None:
        return launch_inputs.find_base_model(
            LaunchRequest(environments[0]), environments[1:], None, tmp_path
        )

    sums = str(build.get_tiny_model_path(build.TinyModelRecipe(), tmp_path))
    assert default("own") == default("arithmetic") == sums
    older, newer = taught(tmp_path, "own"), taught(tmp_path, "own", "89abcdef")
    os.utime(older, (1, 1))
    other = taught(tmp_path, "own-other")
    taught(tmp_path, "arithmetic")
    assert default("own") == str(newer)
    assert default("own", "other") == str(other)
    assert default("other") == default("arithmetic") == sums
    assert launch_inputs.find_base_model(LaunchRequest("own", "tinker"), [], None, tmp_path) is None
    assert launch_inputs.describe_default_model(LaunchRequest("own"), str(newer)) == (
        f"no model is named, so the one taught on own is used: {newer}"
    )
    assert (
        launch_inputs.describe_default_model(LaunchRequest("own", model=str(newer)), str(newer))
        is None
    )
    assert launch_inputs.describe_default_model(LaunchRequest("arithmetic"), sums) is None


def test_an_agent_is_told_when_it_selects(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lachesis.agent.session import AgentSession

    monkeypatch.setenv("LACHESIS_ENVIRONMENTS", str(own.parent))
    desk = AgentSession("s")
    assert "knows sums only" in str(desk.select("own").to_payload()["warning"])
    assert "knows sums only" in str(previews.preview_start(desk).to_payload()["problem"])
    with pytest.raises(ConfigError, match="`lachesis model build --for own`"):
        desk.start()
    taught(desk.service.store.home, "own")
    assert "warning" not in desk.select("own").to_payload()
    with pytest.raises(ServerDownError):
        desk.start()


def test_a_model_that_is_nowhere_is_refused_before_anything_is_submitted(
    refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for command in ("train", "test"):
        answer = refused(command, "arithmetic", "--model", "Qwen/DoesNotExist")
        assert answer["code"] == "model_not_found"
        assert answer["error"].startswith("the model Qwen/DoesNotExist is not on this machine")
    assert "--endpoint-model NAME" in answer["error"]
    assert not (Path(os.environ["LACHESIS_HOME"]) / "runs").exists()


def test_a_cloud_profile_needs_the_tokenizer_of_its_model(
    refused: Refused, monkeypatch: pytest.MonkeyPatch, random_model: str
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("TINKER_API_KEY", "tml-x")
    cloud = ("train", "arithmetic", "--profile", "tinker")
    assert refused(*cloud)["code"] == "model_not_found"
    assert refused(*cloud, "--model", random_model)["code"] == "server_down"


def test_a_name_in_a_test_means_what_it_means_in_train(
    random_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also for the forecast, which is for the run that `train` would make."""
    seen: list[tuple[LaunchRequest, TestOptions]] = []

    def check(self: LachesisService, launch: LaunchRequest, options: TestOptions) -> Any:
        seen.append((launch, options))
        raise ServerDownError("enough")

    monkeypatch.setattr(LachesisService, "check_test", check)

    def asked(*words: str) -> tuple[str | None, list[str] | None]:
        assert main(["test", "arithmetic", *words]) == 1
        launch, options = seen.pop()
        return launch.model, options.models

    assert asked("--model", "Qwen/Qwen3-0.6B") == ("Qwen/Qwen3-0.6B", ["embedded:Qwen/Qwen3-0.6B"])
    assert asked("--model", random_model) == (random_model, [f"embedded:{random_model}"])
    assert asked("--model", "embedded:tiny") == ("tiny", ["embedded:tiny"])
    assert asked("--endpoint-model", "qwen/qwen3-8b") == (None, ["qwen/qwen3-8b"])
    assert asked("--model", "a/b", "--model", "tiny") == (None, ["embedded:a/b", "embedded:tiny"])
    assert asked() == (None, None)
    cloud = ("--profile", "tinker", "--model")
    assert asked(*cloud, "qwen/qwen3-8b") == (None, ["qwen/qwen3-8b"])
    assert asked(*cloud, random_model) == (None, [f"embedded:{random_model}"])


def test_models_at_an_endpoint_keep_the_names_of_the_contract() -> None:
    service = LachesisService()
    with pytest.raises(Exception, match="OPENROUTER_API_KEY"):
        service.check_test(LaunchRequest("arithmetic"), TestOptions(models=["qwen/qwen3-8b"]))
    with pytest.raises(ModelNotFoundError, match="is not a model"):
        service.check_test(LaunchRequest("arithmetic"), TestOptions(models=["embedded:/nowhere"]))


# --- examples to imitate
# ----------------------------------------------------------------------------------------------


def test_the_owner_sets_the_file_of_examples_and_an_agent_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "FILE.jsonl"
    file.write_text('{"prompt": "2+3=", "completion": "5"}\n')
    service = LachesisService()
    edits = (("sft_file", "FILE.jsonl"),)
    for profile in ("embedded", "tinker"):
        config, plan = service.preview(LaunchRequest("arithmetic", profile, edits, by_owner=True))
        assert config.tinker.sft_file == str(file), "the trainer runs in another folder"
        written = tmp_path / f"{profile}.yaml"
        written.write_text(plan.config.to_yaml())
        read_by_trainer = read_config(parse_args(["--config", str(written)])).tinker.sft_file
        assert (
            len(
                sft_examples.read_examples(
                    Path(str(read_by_trainer)), build.build_tokenizer(), max_tokens=99
                )
            )
            == 1
        )
        with pytest.raises(LockedFieldError, match=r"tinker.sft_file is locked .*an agent may not"):
            service.preview(LaunchRequest("arithmetic", profile, edits))
    described = service.describe(LaunchRequest("arithmetic", by_owner=True))
    assert [field["locked"] for field in described["fields"] if field["name"] == "sft_file"] == [
        None
    ]


def test_an_agent_cannot_name_a_file(own: Path) -> None:
    from lachesis.agent.session import AgentSession

    desk = AgentSession("s")
    desk.select("arithmetic")
    for field in ("sft_file", "tinker.sft_file"):
        with pytest.raises(LockedFieldError):
            desk.edit(field, str(own))


@pytest.mark.parametrize("name", ["absent.jsonl", ".", "~nobody/x", "a\nb"])
def test_a_file_that_cannot_be_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FieldValueError, match="allowed: a readable JSONL file"):
        launch_inputs.resolve_examples_file(name)


# --- from an earlier run
# ----------------------------------------------------------------------------------------------


@pytest.fixture
def earlier(random_model: str) -> str:
    """A stopped run of the environment `arithmetic` with a checkpoint of step 4, of another model
    and rank than the default's; its id.
    """
    return write_run(random_model, steps=(4,))


def write_run(model: str, steps: tuple[int, ...], run_id: str = "0123abcd") -> str:
    service = LachesisService()
    environment = service.resolve(LaunchRequest("arithmetic")).environment
    config = run_config.resolve_run_config(
        "arithmetic", "embedded", {"tinker": {"lora_rank": 8}}, model=model
    )
    record = RunRecord(
        run_id=run_id, environment="arithmetic", environment_file=environment.file_path,
        profile="embedded", base_model=model,
        total_steps=9, seed=0, wandb_project="p", wandb_run_name="n", status="stopped",
    )  # fmt: skip
    folder = service.store.create(record, config.to_yaml())
    for step in steps:
        save(Checkpoints(folder.checkpoints), step)
    return run_id


def test_a_run_from_a_checkpoint_takes_its_model_and_rank(earlier: str, random_model: str) -> None:
    config, _ = LachesisService().preview(LaunchRequest("arithmetic", start_from=f"{earlier}@4"))
    assert (config.openai.model_name, config.tinker.lora_rank) == (random_model, 8)
    assert config.env.tokenizer_name == random_model


def test_another_model_or_rank_than_the_checkpoints_is_refused(
    earlier: str, random_model: str, refused: Refused
) -> None:
    begin = ("train", "arithmetic", "--from", f"{earlier}@4")
    answer = refused(*begin, "--model", "tiny")
    tiny = build.get_tiny_model_path(build.TinyModelRecipe(), Path(os.environ["LACHESIS_HOME"]))
    assert (
        f"has base model {random_model} and this run {tiny}; they must be equal, so leave it out"
        in answer["error"]
    )
    assert "has lora_rank 8 and this run 16" in refused(*begin, "--set", "lora_rank=16")["error"]
    assert refused(*begin)["code"] == "server_down"
    assert refused(*begin, "--model", random_model)["code"] == "server_down"


def test_a_field_that_is_no_limit_is_refused_at_a_resume_with_the_command_that_sets_it(
    earlier: str, refused: Refused
) -> None:
    answer = refused("resume", earlier, "--set", "learning_rate=1e-4")
    before, _, after = answer["error"].partition("; to change other fields")
    assert before == (
        "'learning_rate' cannot be changed when a run is resumed; allowed: limits.max_hours, "
        "limits.max_tokens, "
        "limits.max_cost_usd, limits.on_stall, limits.on_crash, limits.stall_after_s, "
        "limits.on_learning_failure"
    )
    command = after.split("`")[1]
    assert command == f"lachesis train arithmetic --from {earlier}@4 --set learning_rate=VALUE"
    assert refused(*shlex.split(command.replace("VALUE", "1e-4"))[1:])["code"] == "server_down"


@pytest.mark.parametrize(
    ("limit", "value"),
    [
        ("max_hours", "9"),
        ("max_tokens", "10_000"),
        ("max_cost_usd", "1.5"),
        ("on_stall", "stop"),
        ("on_crash", "resume"),
        ("stall_after_s", "30"),
        ("on_learning_failure", "stop"),
    ],
)
def test_every_limit_that_is_named_as_allowed_is(
    earlier: str, refused: Refused, limit: str, value: str
) -> None:
    assert refused("resume", earlier, "--set", f"limits.{limit}={value}")["code"] == "server_down"
    assert refused("resume", earlier, "--set", f"{limit}={value}")["code"] == "server_down"


def test_without_a_checkpoint_none_is_promised(random_model: str, refused: Refused) -> None:
    from lachesis.agent.session import AgentSession

    run_id = write_run(random_model, steps=())
    error = refused("resume", run_id, "--set", "learning_rate=1e-4")["error"]
    assert f"{run_id}@" not in error
    command = error.split("`")[1]
    assert command == f"lachesis train arithmetic --model {random_model} --set learning_rate=VALUE"
    assert refused(*shlex.split(command.replace("VALUE", "1e-4"))[1:])["code"] == "server_down"
    assert "would start again from the beginning, because it has no checkpoint" in str(
        previews.preview_resume(AgentSession("s"), run_id).message
    )


def test_what_a_checkpoint_needs_is_verified(earlier: str, refused: Refused) -> None:
    folder = LachesisService().store.dir(earlier)
    (folder.engine / "r" / "weights" / "4" / "adapter_model.safetensors").write_bytes(b"x" * 100)
    assert refused("train", "arithmetic", "--from", f"{earlier}@4")["code"] == CheckpointError.code


def test_an_edit_of_an_older_session_is_read_by_its_type() -> None:
    """What is kept of a draft may be a text where a number is meant."""
    config, _ = LachesisService().preview(
        LaunchRequest("arithmetic", edits=(("env.total_steps", "7"), ("largest", "5")))
    )
    assert isinstance(config, RunConfig)
    assert (config.env.total_steps, config.env.model_extra["largest"]) == (7, 5)  # type: ignore[index]
