"""Foreign code runs in an environment's process, so no key of the user's is there: in a test, a check, a run."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from lachesis import checking, discovery
from lachesis import config as configuration
from lachesis.inference_tests import InferenceRequest, InferenceTests
from lachesis.runs import RunRecord, RunStore
from lachesis.supervision.group import ServiceGroup
from lachesis.supervision.plan import make_plan
from tasks.inference import Bench, ask_model
from tests.endpoint import serving
from tests.patience import deadline

pytestmark = pytest.mark.timeout(400)
SUMS = Path(__file__).resolve().parents[1] / "environments" / "sums.py"
NOSY = """
import json as _json, os as _os
with open(_os.environ["NOSY_FILE"], "a") as _out:
    _out.write(_json.dumps([dict(_os.environ), open("/proc/self/environ").read()]) + "\\n")
"""
KEYS = ("OPENAI_API_KEY", "OPENROUTER_API_KEY", "WANDB_API_KEY", "TINKER_API_KEY")


@pytest.fixture
def nosy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The sums, in a file that writes down the variables of each process which imports it. All keys are there to be found."""
    for name in KEYS:
        monkeypatch.setenv(name, f"secret-of-{name}")
    monkeypatch.setenv("NOSY_FILE", str(tmp_path / "environ.jsonl"))
    monkeypatch.setenv("LACHESIS_PASS", "NOSY_FILE")
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    file = tmp_path / "nosy.py"
    file.write_text(NOSY + SUMS.read_text())
    return file


def seen(file: Path) -> list[dict[str, str]]:
    """Return the variables of each process; none may hold a key."""
    text = file.with_name("environ.jsonl").read_text()
    assert "secret-of" not in text
    return [json.loads(line)[0] for line in text.splitlines()]


def test_in_an_inference_test(nosy: Path, random_model: str, clean_environment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment's process samples at the endpoint all the same, and logs to W&B offline."""
    config = configuration.resolve("sums", "embedded", {"env": {"kind": "sound"}}, model=random_model)
    asked = InferenceRequest(environment="sums", environment_file=str(nosy), models=["right"], num_steps=2, group_size=4)
    tests = InferenceTests(clean_environment)
    test = tests.create(asked, config.to_yaml(), class_name="Sums")
    with serving() as endpoint:
        monkeypatch.setenv("OPENAI_BASE_URL", endpoint.url)
        lock = os.open(tests.dir(test.test_id) / ".alive", os.O_CREAT | os.O_RDWR)
        ask_model.fn(Bench(tests, test, config, lock), "right", "run-of-the-test")
        assert endpoint.keys == {"Bearer secret-of-OPENAI_API_KEY"}
    assert tests.groups_done(test) == 2
    assert [(found["WANDB_MODE"], found["WANDB_PROJECT"]) for found in seen(nosy)] == [("offline", "mine")]
    held = [file for file in tests.root.rglob("*") if file.is_file() and b"secret-of" in file.read_bytes()]
    assert held == []


def test_in_a_check(nosy: Path, random_model: str, tmp_path: Path) -> None:
    """It does not log to W&B at all: with a key and no way to its server, that would end in a time-out."""
    environment = discovery.find(discovery.adopt(str(nosy)))
    config = configuration.resolve("sums", "embedded", {"env": {"kind": "sound"}}, model=random_model)
    (tmp_path / "check").mkdir()
    lines = checking.check(environment, config, tmp_path / "check")
    assert {line.status for line in lines} <= {"passed", "warned"}, lines
    assert {found["WANDB_MODE"] for found in seen(nosy)} == {"disabled"}
    assert len(seen(nosy)) == 2
    assert not list((tmp_path / "check").rglob("wandb"))


@pytest.mark.parametrize("passed", [False, True])
def test_in_a_run(
    nosy: Path, random_model: str, tmp_path: Path, clean_environment: Path, monkeypatch: pytest.MonkeyPatch, *, passed: bool
) -> None:
    """Its log of W&B is offline, unless its user gives it the key."""
    config = configuration.resolve(
        "sums", "embedded", {"env": {"use_wandb": True}, "tinker": {"use_wandb": True}}, model=random_model
    )
    store = RunStore(clean_environment)
    rest = {"base_model": random_model, "total_steps": 1, "seed": 0, "wandb_project": "p", "wandb_run_name": "n"}
    record = RunRecord(run_id="0123abcd", environment="sums", environment_file=str(nosy), profile="embedded", **rest)
    store.create(record, config.to_yaml())
    if passed:
        monkeypatch.setenv("LACHESIS_PASS", "NOSY_FILE WANDB_API_KEY")
    plan = make_plan(record, store.dir(record.run_id), config)
    spec = plan.service("environment")
    assert ("WANDB_API_KEY" in spec.env) is passed
    assert "secret-of-WANDB_API_KEY" in plan.service("trainer").env.values()
    if passed:
        assert "WANDB_MODE" not in spec.env
        return
    plan.write()
    with ServiceGroup() as group:
        group.start(spec)
        until = deadline(60)
        while not nosy.with_name("environ.jsonl").is_file() or not seen(nosy):
            assert group.running("environment"), spec.log.read_text()
            assert time.monotonic() < until
            time.sleep(0.1)
    (found,) = seen(nosy)
    assert found["WANDB_MODE"] == "offline"
