"""A run that starts from the checkpoint of another one, or goes on with other limits."""

import os
import shlex
from pathlib import Path

import pytest

from lachesis.agent_tools import launches
from lachesis.base.errors import CheckpointError
from lachesis.checkpoints.manifests import Checkpoints
from lachesis.config import run_config as run_config
from lachesis.config.launch_spec import LaunchSpec
from lachesis.inference_tests.required_test import make_planned_run
from lachesis.inference_tests.store import InferenceTestStore
from lachesis.launch.create_run import make_run_record
from lachesis.operations.launches import preview_launch, resolve_launch
from lachesis.runs.store import RunStore
from lachesis.supervision.services.plan import make_training_plan
from lachesis.tiny_model import build
from tests.checkpoints.test_manifests import save
from tests.harness import home

# --- from an earlier run
# ----------------------------------------------------------------------------------------------


@pytest.fixture
def earlier(random_model):
    """A stopped run of the environment `arithmetic` with a checkpoint of step 4, of another model
    and rank than the default's; its id.
    """
    return write_run(random_model, steps=(4,))


def write_run(model, steps, run_id="0123abcd"):
    store = RunStore()
    environment = resolve_launch(store, LaunchSpec(environment="arithmetic")).environment
    record = home.write_run(
        store,
        edits={"tinker": {"lora_rank": 8}},
        run_id=run_id,
        environment="arithmetic",
        environment_file=environment.file_path,
        base_model=model,
        status="stopped",
    )
    folder = store.dir(record.run_id)
    for step in steps:
        save(Checkpoints(folder.checkpoints), step)
    return run_id


def test_a_run_from_a_checkpoint_takes_its_model_and_rank(earlier, random_model):
    spec = LaunchSpec(environment="arithmetic", from_checkpoint=f"{earlier}@4")
    config = preview_launch(RunStore(), spec).launch.config
    assert (config.openai.model_name, config.tinker.lora_rank) == (random_model, 8)
    assert config.env.tokenizer_name == random_model


@pytest.mark.parametrize("start", ["base", "checkpoint", "examples"])
def test_the_base_model_is_evaluated_apart_where_the_run_does_not_start_from_it(
    earlier, random_model, tmp_path, start
):
    """The record, the forecast and the command of the trainer say the same."""
    examples = tmp_path / "examples.jsonl"
    examples.write_text('{"messages": [{"role": "user", "content": "1"}]}\n')
    spec = LaunchSpec(environment="arithmetic", model=random_model)
    if start == "checkpoint":
        spec = spec.model_copy(update={"from_checkpoint": f"{earlier}@4"})
    elif start == "examples":
        spec = spec.with_set_fields({"tinker.sft_file": str(examples)})
    store, is_base = RunStore(), start == "base"
    launch = resolve_launch(store, spec)
    record = make_run_record(launch, "89abcdef", InferenceTestStore(store.home))
    assert (launch.starts_from_base, record.starts_from_base) == (is_base, is_base)
    planned = make_planned_run(launch.config, starts_from_base=launch.starts_from_base)
    assert planned.evaluations == 13 + int(not is_base)
    plan = make_training_plan(record, store.dir("89abcdef"), launch.config)
    assert ("--evaluate-base" in plan.get_service("trainer").argv) is not is_base


def test_another_model_or_rank_than_the_checkpoints_is_refused(earlier, random_model, refused):
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
    earlier, refused
):
    answer = refused("resume", earlier, "--set", "learning_rate=1e-4")
    before, _, after = answer["error"].partition("; to change other fields")
    assert before == (
        "'learning_rate' cannot be changed when a run is resumed; allowed: limits.max_hours, "
        "limits.max_tokens, "
        "limits.max_cost_usd, limits.on_stall, limits.on_crash, limits.stall_after_s, "
        "limits.on_learning_failure, env.total_steps"
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
def test_every_limit_that_is_named_as_allowed_is(earlier, refused, limit, value):
    assert refused("resume", earlier, "--set", f"limits.{limit}={value}")["code"] == "server_down"
    assert refused("resume", earlier, "--set", f"{limit}={value}")["code"] == "server_down"


def test_a_completed_run_is_resumed_with_more_steps_only(earlier, refused):
    store = RunStore()
    store.update(earlier, status="completed", total_steps=4)
    error = refused("resume", earlier)["error"]
    command = f"`lachesis resume {earlier} --set total_steps=8`"
    assert error.startswith(f"run {earlier} has completed its 4 steps; {command} trains on")
    assert refused("resume", earlier, "--set", "total_steps=many")["code"] == "field_value"
    answer = refused("resume", earlier, "--set", "total_steps=3")
    assert "total_steps is 3, and run 0123abcd has made 4 steps; allowed: a" in answer["error"]
    before = store.dir(earlier).config.read_text()
    for name in ("total_steps", "env.total_steps"):
        assert refused("resume", earlier, "--set", f"{name}=6")["code"] == "server_down"
    assert store.dir(earlier).config.read_text() == before, "nothing is changed"
    assert store.load(earlier).total_steps == 4


def test_without_a_checkpoint_none_is_promised(random_model, refused):
    from lachesis.agent_tools.session import AgentSession

    run_id = write_run(random_model, steps=())
    error = refused("resume", run_id, "--set", "learning_rate=1e-4")["error"]
    assert f"{run_id}@" not in error
    command = error.split("`")[1]
    assert command == f"lachesis train arithmetic --model {random_model} --set learning_rate=VALUE"
    assert refused(*shlex.split(command.replace("VALUE", "1e-4"))[1:])["code"] == "server_down"
    assert "would continue from the beginning, because it has no checkpoint" in str(
        launches.preview_resume(AgentSession("s"), run_id)["message"]
    )


def test_what_a_checkpoint_needs_is_verified(earlier, refused):
    folder = RunStore().dir(earlier)
    (folder.engine / "r" / "weights" / "4" / "adapter_model.safetensors").write_bytes(b"x" * 100)
    assert refused("train", "arithmetic", "--from", f"{earlier}@4")["code"] == CheckpointError.code
