"""Check what the owner's policy.yaml allows agents, and that no tool gets past it."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import yaml

from lachesis.agent_tools import environment_checks
from lachesis.base.errors import ConfigError, PolicyError
from lachesis.config.launch_spec import LaunchSpec, TestSpec
from lachesis.config.owner_policy import load_policy
from lachesis.config.run_config import RunConfig
from lachesis.inference_tests.store import InferenceTestStore
from lachesis.operations.inference_tests import start_test
from lachesis.operations.launches import check_launch, resolve_launch, start_run
from lachesis.prefect_client import background_serve, submit
from lachesis.runs.store import RunStore, read_effective_config
from lachesis.spending import agent_limits
from tests.tinker_cloud.stand_ins import ensure_stand_in

MODEL, OTHER_MODEL = "Qwen/Qwen3-8B", "Qwen/Qwen3-4B-Instruct-2507"
KEYS = {"TINKER_API_KEY": "set", "TINKER_BASE_URL": "set", "OPENROUTER_API_KEY": "set"}


@pytest.fixture(scope="module")
def hf_home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hf")
    for name in (MODEL, OTHER_MODEL):
        ensure_stand_in(name, folder)
    return folder


@pytest.fixture(autouse=True)
def paid_path(hf_home, submitted, monkeypatch):
    """All keys are there, and what is submitted goes nowhere."""
    monkeypatch.setenv("HF_HOME", str(hf_home))
    monkeypatch.setattr(background_serve, "read_key_names", lambda: KEYS)

    def submit_test(store, test):
        store.fail(test.test_id, "nobody performs it")

    monkeypatch.setattr(submit, "submit_test", submit_test)


def write_policy(home, **agents):
    (home / "policy.yaml").write_text(yaml.safe_dump({"agents": agents}))


def read_config(home, run_id):
    return read_effective_config(RunStore(home).dir(run_id))


def start_confirmed(ask, **arguments):
    """Start after a yes to the preview; what needs none is started or refused at once."""
    preview = ask("rl_start_training", **arguments)
    if "preview" not in preview:
        return preview
    return ask("rl_start_training", **arguments, confirm=preview["preview"])


def test_without_a_file_only_the_locks_bind_agents(ask, home):
    assert load_policy(home).limits_cost is False
    ask("rl_select_environment", name="arithmetic", profile="tinker")
    assert ask("rl_edit_config", field="total_steps", value=60)["code"] == "locked_field"
    refused = start_confirmed(ask)
    assert refused["code"] == "validation_missing", refused
    assert f"lachesis test arithmetic --profile tinker --model {MODEL}" in refused["error"]


def test_the_owner_says_what_agents_may_use(ask, home):
    write_policy(home, environments=["arith*"], profiles=["tinker"], models=[MODEL])
    refused = ask("rl_select_environment", name="countdown", profile="tinker")
    assert (refused["code"], refused["allowed"]) == ("policy", ["arith*"])
    assert ask("rl_select_environment", name="arithmetic")["code"] == "policy"
    ask("rl_select_environment", name="arithmetic", profile="tinker", model=OTHER_MODEL)
    assert "agents may not use the model" in ask("rl_test_inference")["error"]
    assert ask("rl_check_environment", environment="countdown")["code"] == "policy"
    mixed = ask("rl_edit_config", field="mixture", value={"countdown": {"weight": 1}})
    assert ask("rl_start_training", dry_run=True)["code"] == "policy", mixed


def test_the_owner_says_which_fields_agents_set(ask, home):
    write_policy(home, fields=["total_steps"], locked_fields=["group_size", "env.largest"])
    ask("rl_select_environment", name="arithmetic", profile="tinker")
    assert ask("rl_edit_config", field="total_steps", value=60)["value"] == 60
    assert ask("rl_edit_config", field="learning_rate", value=0.1)["code"] == "locked_field"
    for name in ("group_size", "largest"):
        refused = ask("rl_edit_config", field=name, value=8)
        assert "the owner's policy.yaml does not let agents set it" in refused["error"]
    owner = LaunchSpec(environment="arithmetic", profile="tinker", settings={"group_size": 8})
    assert resolve_launch(RunStore(home), owner).config.env.group_size == 8


def test_a_run_of_an_agent_has_the_limit_that_is_left(ask, home):
    write_policy(home, max_cost_usd_per_run=5, max_cost_usd_per_day=8, require_validation=False)
    ask("rl_select_environment", name="arithmetic", profile="tinker")
    first = start_confirmed(ask)["run_id"]
    assert read_config(home, first).limits.max_cost_usd == 5
    second = start_confirmed(ask)["run_id"]
    assert read_config(home, second).limits.max_cost_usd == 3
    refused = start_confirmed(ask)
    assert "spent or reserved 8 US dollars in the last 24 hours" in refused["error"]
    store = RunStore(home)
    store.update(first, status="failed")
    third = start_confirmed(ask)["run_id"]
    assert read_config(home, third).limits.max_cost_usd == 5, "the first one cost nothing"
    store.update(third, status="failed")
    raised = start_confirmed(ask, resume=third, limits={"max_cost_usd": 6})
    assert raised["code"] == "policy"
    ask("rl_edit_config", field="max_cost_usd", value=5.5)
    assert "at most 5 US dollars" in start_confirmed(ask)["error"]


def test_a_resumed_run_keeps_the_limit_that_was_left_to_it(ask, home):
    """Sums of what others and the run itself have spent do not fall below it by rounding."""
    write_policy(home, max_cost_usd_per_day=5, require_validation=False)
    ask("rl_select_environment", name="arithmetic", profile="tinker")
    store = RunStore(home)

    def run_and_end(cost_usd):
        started = start_confirmed(ask)
        run_id = str(started["run_id"])
        store.dir(run_id).spent.write_text(json.dumps({"cost_usd": cost_usd}))
        store.update(run_id, status="stopped")
        return run_id

    run_ids = [run_and_end(cost) for cost in (0.032374, 0.03259, 0.032465, 0.032424, 0.004839)]
    config = read_config(home, run_ids[-1])
    assert config.limits.max_cost_usd == 4.870147
    resumed = agent_limits.restrict_run(config, store, store.load(run_ids[-1]))
    assert resumed.limits.max_cost_usd == 4.870147


def test_a_test_of_an_agent_is_bounded_too(ask, home):
    write_policy(home, max_cost_usd_per_run=1)
    ask("rl_select_environment", name="arithmetic", profile="tinker")
    refused = ask("rl_test_inference", num_steps=100, group_size=256)
    assert "fewer groups or a smaller max_token_length" in refused["error"]
    refused = ask("rl_test_inference", models=["qwen/qwen3-8b"])
    assert "the price of qwen/qwen3-8b at an endpoint is not known" in refused["error"]
    store = RunStore(home)
    spec = TestSpec(environment="arithmetic", profile="tinker", by_agent=True)
    test = start_test(store, spec)
    assert test.request.models == [f"tinker:{MODEL}"]
    assert test.max_cost_usd == pytest.approx(3 * 16 * 8192 * (0.195 + 0.60) / 1e6)
    assert agent_limits.compute_committed_cost(store) == test.max_cost_usd


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("agents: {max_cost: 3}", "agents.max_cost"),
        ("agents: {max_cost_usd_per_run: -1}", "greater than 0"),
        ("agents: [", "is not YAML"),
        ("agents: {profiles: [moon]}", "agents.profiles.0"),
    ],
)
def test_a_wrong_file_stops_agents_by_a_sentence(home, content, words):
    (home / "policy.yaml").write_text(content)
    with pytest.raises(ConfigError, match=words.replace(".", r"\.")):
        load_policy(home)


# What an agent may try; about half of it is forbidden by the policy below.
TRIED: dict[str, tuple[Any, ...]] = {
    "name": ("arithmetic", "countdown", "reverse_text"),
    "environment": ("arithmetic", "countdown", "made_up"),
    "profile": ("embedded", "tinker", "tinker", "custom"),
    "model": (None, MODEL, OTHER_MODEL, "tiny"),
    "models": (None, [f"tinker:{MODEL}"], [f"tinker:{OTHER_MODEL}"], ["qwen/qwen3-8b"]),
    "field": ("total_steps", "group_size", "max_cost_usd", "mixture", "learning_rate", "seed"),
    "value": (1, 16, 0.5, 60, 1e6, None, {"countdown": {"weight": 1}}),
    "num_steps": (1, 3, 100),
    "group_size": (2, 16, 256),
    "limits": (None, {"max_cost_usd": 50}, {"max_cost_usd": 1.0}),
}
WEIGHTS = {
    "rl_select_environment": 4,
    "rl_edit_config": 6,
    "rl_start_training": 6,
    "rl_test_inference": 3,
    "rl_check_environment": 1,
}
PER_RUN, PER_DAY = 2.0, 5.0


@pytest.mark.parametrize("seed", range(4))
def test_no_tool_gets_past_the_policy(ask, home, desk, monkeypatch, seed):
    write_policy(
        home,
        environments=["arithmetic", "reverse_text"],
        profiles=["embedded", "tinker"],
        models=[MODEL, "tiny-*"],
        fields=["total_steps"],
        locked_fields=["seed"],
        max_cost_usd_per_run=PER_RUN,
        max_cost_usd_per_day=PER_DAY,
        require_validation=False,
    )
    rng = random.Random(seed)
    monkeypatch.setattr(
        environment_checks,
        "_start_process",
        lambda check, install: (
            None if check.request.environment == "arithmetic" else pytest.fail(str(check.request))
        ),
    )
    store = RunStore(home)
    outcomes: set[str] = set()
    ask("rl_select_environment", name="arithmetic", profile="tinker")
    start_confirmed(ask)
    for _ in range(90):
        tool = rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
        arguments = _draw_arguments(rng, tool, store)
        answer = ask(tool, **arguments)
        if "preview" in answer:
            answer = ask(tool, **arguments, confirm=answer["preview"])
        outcomes.add(str(answer.get("code", "done")))
        _end_some(rng, store)
        _assert_allowed(store)
    assert {"policy", "done", "locked_field"} <= outcomes, outcomes
    assert any(record.profile == "tinker" for record in store.all()), "nothing was paid"


def _draw_arguments(rng, tool, store):
    names = {
        "rl_select_environment": ("name", "profile", "model"),
        "rl_edit_config": ("field", "value"),
        "rl_start_training": (),
        "rl_test_inference": ("models", "num_steps", "group_size"),
        "rl_check_environment": ("environment",),
    }[tool]
    arguments = {name: rng.choice(TRIED[name]) for name in names}
    records = store.all()
    if tool == "rl_start_training" and records and rng.random() < 0.4:
        arguments = {"resume": rng.choice(records).run_id}
        arguments["limits"] = rng.choice(TRIED["limits"])
    return arguments


def _end_some(rng, store):
    for record in store.all():
        if not record.has_ended and rng.random() < 0.2:
            store.update(record.run_id, status="failed")


def _assert_allowed(store):
    """Whatever was made is what the owner allows."""
    defaults = RunConfig.model_fields["tinker"].default
    for record in store.all():
        config = read_effective_config(store.dir(record.run_id))
        assert set(config.build_environment_configs()) <= {"arithmetic", "reverse_text"}
        assert record.profile in ("embedded", "tinker")
        assert config.tinker.seed == defaults.seed
        assert record.base_model == MODEL or Path(record.base_model).name.startswith("tiny-")
        if record.profile == "tinker":
            assert config.limits.max_cost_usd is not None
            assert config.limits.max_cost_usd <= PER_RUN
            assert config.tinker.learning_rate == defaults.learning_rate
    for test in InferenceTestStore(store.home).all():
        assert test.request.environment in ("arithmetic", "reverse_text")
        assert not [model for model in test.request.models if OTHER_MODEL in model]
    assert agent_limits.compute_committed_cost(store) <= PER_DAY + 1e-9


def test_two_agents_at_once_do_not_spend_more_than_the_day_has(home):
    """What was checked before another one has reserved the money is refused when it is made."""
    write_policy(home, max_cost_usd_per_day=5, require_validation=False)
    store = RunStore(home)
    spec = LaunchSpec(environment="arithmetic", profile="tinker", confirmed=True, by_agent=True)
    launch = check_launch(store, spec)
    start_run(store, launch)
    with pytest.raises(PolicyError, match="spent or reserved 5"):
        start_run(store, launch)
    assert len(store.all()) == 1
