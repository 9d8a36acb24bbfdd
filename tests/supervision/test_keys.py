"""Foreign code runs in an environment's process, so no key of the user's is there: in a test or a
run; `test_checking` has the check.
"""

import os
from pathlib import Path

import pytest

from lachesis.config import run_config as run_config
from lachesis.config.launch_spec import TestSpec
from lachesis.inference_tests.answer_items import TestContext, answer_items
from lachesis.inference_tests.store import InferenceRequest, InferenceTestStore
from lachesis.runs.store import RunStore
from lachesis.supervision.running_services import ServiceGroup
from lachesis.supervision.services.plan import make_training_plan
from tests.harness.home import make_record
from tests.harness.openai_endpoint import serving
from tests.harness.process_variables import make_nosy, read_variables
from tests.harness.waiting import wait_until

pytestmark = pytest.mark.timeout(400)
SUMS = Path(__file__).resolve().parents[1] / "environments" / "sums.py"


@pytest.fixture
def nosy(tmp_path, monkeypatch):
    """The sums, in a file that writes down the variables of each process which imports it."""
    file = tmp_path / "nosy.py"
    file.write_text(SUMS.read_text())
    make_nosy(file, monkeypatch)
    return file


def test_in_an_inference_test(nosy, random_model, clean_environment, monkeypatch):
    """The environment's process samples at the endpoint all the same, and logs to W&B offline."""
    config = run_config.resolve_run_config(
        "sums", "embedded", {"env": {"kind": "sound"}}, model=random_model
    )
    asked = InferenceRequest(
        environment="sums",
        environment_file=str(nosy),
        models=["right"],
        spec=TestSpec(environment="sums", steps=2, group_size=4),
    )
    tests = InferenceTestStore(clean_environment)
    test = tests.create(asked, config.to_yaml(), class_name="Sums")
    with serving() as endpoint:
        monkeypatch.setenv("OPENAI_BASE_URL", endpoint.url)
        lock = os.open(tests.dir(test.test_id) / ".alive", os.O_CREAT | os.O_RDWR)
        answer_items(TestContext(tests, test, config, lock), "right", "run-of-the-test")
        assert endpoint.keys == {"Bearer secret-of-OPENAI_API_KEY"}
    assert tests.count_finished_groups(test) == 2
    variables = read_variables(nosy, endpoint_key="secret-of-OPENAI_API_KEY")
    assert [(found["WANDB_MODE"], found["WANDB_PROJECT"]) for found in variables] == [
        ("offline", "mine")
    ]
    held = [
        file
        for file in tests.root.rglob("*")
        if file.is_file() and b"secret-of" in file.read_bytes()
    ]
    assert held == []


@pytest.mark.parametrize("passed", [False, True])
def test_in_a_run(nosy, random_model, tmp_path, clean_environment, monkeypatch, *, passed):
    """Its log of W&B is offline, unless its user gives it the key."""
    config = run_config.resolve_run_config(
        "sums",
        "embedded",
        {"env": {"use_wandb": True}, "tinker": {"use_wandb": True}},
        model=random_model,
    )
    store = RunStore(clean_environment)
    rest = {
        "base_model": random_model,
        "total_steps": 1,
        "seed": 0,
        "wandb_project": "p",
        "wandb_run_name": "n",
    }
    record = make_record(
        run_id="0123abcd",
        environment="sums",
        environment_file=str(nosy),
        profile="embedded",
        **rest,
    )
    store.create(record, config.to_yaml())
    if passed:
        monkeypatch.setenv("LACHESIS_ENVIRONMENT_VARIABLES", "NOSY_FILE WANDB_API_KEY")
    plan = make_training_plan(record, store.dir(record.run_id), config)
    spec = plan.get_service("environment")
    assert ("WANDB_API_KEY" in spec.env) is passed
    assert "secret-of-WANDB_API_KEY" in plan.get_service("trainer").env.values()
    if passed:
        assert "WANDB_MODE" not in spec.env
        return
    plan.write_files()
    with ServiceGroup() as group:
        group.start(spec)
        written = nosy.with_name("environ.jsonl")
        wait_until(lambda: written.is_file() and read_variables(nosy), 60, log=spec.log)
    (found,) = read_variables(nosy)
    assert found["WANDB_MODE"] == "offline"
