"""A run's record and its configuration become the services that it needs."""

import json
import stat

import pytest

from lachesis.base.errors import ConfigError
from lachesis.config import run_config as run_config
from lachesis.runs.folder import RunDir
from lachesis.runs.store import RunStore, read_effective_config
from lachesis.supervision.services.inference_test import (
    make_base_model_plan,
    make_inference_test_spec,
    make_stage_check_spec,
)
from lachesis.supervision.services.plan import make_training_plan
from tests.harness.home import make_record


def test_an_environment_that_was_written_into_the_configuration_by_hand_is_told(tmp_path):
    """The record says which code the run began with; an environment that it does not know has
    none.
    """
    record = make_record(
        run_id="00000001", environment="replay", environment_file="replay.py", profile="embedded",
        base_model="m",
        total_steps=2, seed=0, wandb_project="p", wandb_run_name="n",
    )  # fmt: skip
    store = RunStore(tmp_path)

    def config(mixture):
        return run_config.resolve_run_config(
            "replay", "embedded", {"env": {"mixture": mixture}}, model="m"
        )

    assert make_training_plan(record, store.dir(record.run_id), config({})).environment_names == {
        "environment": "replay"
    }
    with pytest.raises(
        ConfigError, match=r"environments replay, other; allowed: .* began with \(replay\)"
    ):
        make_training_plan(record, store.dir(record.run_id), config({"other": {"weight": 1.0}}))


def test_only_a_process_whose_files_are_all_in_the_cache_is_kept_off_the_hub(tmp_path, monkeypatch):
    """A run that trains elsewhere leaves a tokenizer in the cache; an engine needs weights too."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_TOKEN", "hf_x")
    place = tmp_path / "hub" / "models--Qwen--Small"
    snapshot = place / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text("abc")
    for name in ("config.json", "tokenizer.json"):
        (snapshot / name).write_text("{}")
    for profile in ("embedded", "tinker"):
        config = run_config.resolve_run_config("replay", profile, {}, model="Qwen/Small")
        plan = make_base_model_plan(config, tmp_path / "test")
        engine, server = (plan.get_service(name).env for name in ("engine", "inference"))
        assert ("HF_HUB_OFFLINE" in engine, engine.get("HF_TOKEN")) == (False, "hf_x"), profile
        assert ("HF_HUB_OFFLINE" in server, "HF_TOKEN" in server) == (True, False), profile
    (snapshot / "model.safetensors").write_text("{}")
    plan = make_base_model_plan(config, tmp_path / "test")
    assert plan.get_service("engine").env["HF_HUB_OFFLINE"] == "1"


def test_each_environment_process_is_told_how_prompts_are_rendered(tmp_path):
    """A run, a test and the stages without a model start one each."""
    settings = {"thinking": "off", "chat_template_kwargs": {"tone": "dry"}}
    config = run_config.resolve_run_config("replay", "embedded", {"tinker": settings}, model="m")
    record = make_record(environment="replay", environment_file="replay.py")
    plan = make_training_plan(record, RunStore(tmp_path).dir(record.run_id), config)
    output = tmp_path / "out"
    tested, _ = make_inference_test_spec("replay.py", config.to_yaml(), output, {}, client_env={})
    checked, _ = make_stage_check_spec("replay.py", "Replay", config, tmp_path, output)
    for service in (plan.get_service("environment"), tested, checked):
        assert json.loads(service.env["LACHESIS_TEMPLATE_SETTINGS"]) == settings


@pytest.mark.parametrize(
    ("env", "set_fields", "has_logged", "is_used"),
    [
        ({}, {}, False, False),
        ({"WANDB_API_KEY": "x"}, {}, False, True),
        ({"WANDB_MODE": "offline"}, {}, False, True),
        ({}, {"tinker.use_wandb": True}, False, True),
        ({}, {}, True, True),
        ({"WANDB_API_KEY": "x"}, {"tinker.use_wandb": False}, False, False),
        ({}, {"tinker.trackers": ["wandb"]}, False, True),
    ],
)
def test_wandb_is_used_where_there_is_a_key_or_it_was_asked_for(
    tmp_path, monkeypatch, env, set_fields, has_logged, is_used
):
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    edits = {"tinker": {key.partition(".")[2]: value for key, value in set_fields.items()}}
    config = run_config.resolve_run_config("sums", "embedded", edits, model="m")
    record = make_record(set_fields=set_fields)
    folder = RunDir(tmp_path, record.run_id)
    if has_logged:
        (folder.path / "wandb").mkdir(parents=True)
    planned = make_training_plan(record, folder, config).config
    assert planned.tinker.use_wandb is is_used
    assert planned.env.use_wandb is False, "the trainer logs, and no environment beside it"


def test_what_was_asked_for_stays_and_each_attempt_has_its_own(tmp_path):
    """A resume tells the next attempt other steps, and each attempt listens on other ports."""
    store, record = RunStore(tmp_path), make_record(environment="sums")
    asked = run_config.resolve_run_config("sums", "embedded", {}, model="m")
    folder = store.create(record, asked.to_yaml())
    assert read_effective_config(folder) == asked
    for attempt, total_steps in ((1, 300), (2, 400), (10, 500)):
        env = read_effective_config(folder).env.model_copy(update={"total_steps": total_steps})
        config = asked.model_copy(update={"env": env})
        plan = make_training_plan(record.model_copy(update={"attempt": attempt}), folder, config)
        plan.write_files()
        file = folder.get_attempt_config(attempt)
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        effective = read_effective_config(folder)
        assert effective.env.total_steps == total_steps, "the newest, and 10 is newer than 2"
        content = json.loads(folder.get_attempt_plan(attempt).read_text())
        api_port, trainer_port = content["ports"]["api"], content["ports"]["trainer"]
        assert effective.env.rollout_server_url == f"http://127.0.0.1:{api_port}"
        assert effective.openai.base_url == f"http://127.0.0.1:{trainer_port}/v1"
        commands = {service["name"]: service["command"] for service in content["services"]}
        assert str(file) in commands["trainer"]
        assert str(file) in commands["environment"]
        token = plan.get_service("engine").env["LACHESIS_ENGINE_TOKEN"]
        assert token not in folder.get_attempt_plan(attempt).read_text()
    assert folder.config.read_text() == asked.to_yaml()
