"""A training is started in Prefect, by its REST API here, and is what `lachesis train` starts."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lachesis.base.json_text import Json
from lachesis.base.timestamps import now_iso
from lachesis.runs.store import RunStore
from tests.e2e.conftest import ROOT
from tests.harness.hostile_inputs import ARITHMETIC, BAD_INPUTS, BadInput
from tests.harness.prefect_api import Server

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]
SMALL = "batch_size=16\ngroup_size=4\ntinker.final_evaluation=false\nuse_wandb=false"


@pytest.fixture(scope="module")
def server(served_home):
    return Server(served_home)


def find_run(home, flow_run):
    records = RunStore(home).all()
    return next((record for record in records if record.flow_run_id == flow_run), None)


def test_the_form_of_train_is_for_people(server):
    deployment = server.ask("GET", "/deployments/name/train/train")
    assert deployment["tags"] == ["lachesis"]
    assert "**What to fill in.**" in deployment["description"]
    schema = deployment["parameter_openapi_schema"]
    assert schema["required"] == ["environment"]
    assert schema["additionalProperties"] is False
    fields = schema["properties"]
    assert "arithmetic" in fields["environment"]["enum"]
    assert fields["steps"] == {
        "title": "Steps",
        "description": "Training steps. Empty: the profile's number.",
        "type": "integer",
        "minimum": 1,
        "maximum": 10_000_000,
        "position": 2,
    }
    assert all("description" in field and "anyOf" not in field for field in fields.values())
    tick = server.ask("GET", "/deployments/name/monitor/monitor")
    assert tick["tags"] == ["lachesis-tick"]


def test_the_server_refuses_bad_inputs_at_the_submission(server):
    deployment = server.deployment("train")
    for bad in BAD_INPUTS:
        if bad.by_server:
            body = {"parameters": bad.parameters}
            answer = server.send("POST", f"/deployments/{deployment}/create_flow_run", body)
            assert answer.status_code == 409, bad.name
            for word in bad.words:
                assert word in answer.text, bad.name


def test_the_flow_refuses_what_the_server_did_not_check(server, served_home):
    """Schedules need this: their parameters are not checked when they are made."""
    run_ids_before = {record.run_id for record in RunStore(served_home).all()}
    flow_run = server.start("train", {**ARITHMETIC, "steps": "ten"}, enforce_parameter_schema=False)
    state = server.ended(flow_run)
    assert (state["type"], state["name"]) == ("FAILED", "Refused")
    assert state["message"].startswith("the parameter steps is 'ten'; allowed: integer, at least 1")
    assert "Traceback" not in "\n".join(server.log_lines(flow_run))
    assert {record.run_id for record in RunStore(served_home).all()} == run_ids_before


@pytest.mark.matrix
@pytest.mark.parametrize("bad", BAD_INPUTS, ids=lambda bad: bad.name)
def test_a_bad_input_is_refused_by_rest_and_by_prefects_command(
    server: Server, served_home: Path, tmp_path: Path, bad: BadInput
) -> None:
    """Refuse what the server can check at the submission, and the rest in the flow."""
    run_ids_before = {record.run_id for record in RunStore(served_home).all()}
    path = f"/deployments/{server.deployment('train')}/create_flow_run"
    answer = server.send("POST", path, {"parameters": bad.parameters})
    command = run_prefect(
        server, tmp_path, "deployment", "run", "train/train", "--params", json.dumps(bad.parameters)
    )
    output = " ".join((command.stdout + command.stderr).split())
    if bad.by_server:
        assert (answer.status_code, command.returncode) == (409, 1)
        texts = [answer.text, output]
    else:
        assert (answer.status_code, command.returncode) == (201, 0), output
        named = re.search("UUID: ([0-9a-f-]{36})", output)
        assert named is not None, output
        states = [server.ended(flow_run) for flow_run in (answer.json()["id"], named[1])]
        assert [state["name"] for state in states] == ["Refused", "Refused"]
        texts = [state["message"] for state in states]
    for text in texts:
        for word in bad.words:
            assert word in text, text
    assert {record.run_id for record in RunStore(served_home).all()} == run_ids_before


def run_prefect(server, folder, *words):
    """Run Prefect's own command with an empty home of its own."""
    env = {**os.environ, "PREFECT_API_URL": server.url, "PREFECT_HOME": str(folder)}
    command = [sys.executable, "-m", "prefect", *words]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=90, check=False, env=env, cwd=folder
    )


@pytest.mark.matrix
def test_prefects_command_starts_a_training(
    server: Server, served_home: Path, tmp_path: Path
) -> None:
    words = [f"settings={json.dumps(SMALL)}", 'environment="arithmetic"', "steps=2", "seed=3"]
    options = [word for pair in words for word in ("-p", pair)]
    done = run_prefect(server, tmp_path, "deployment", "run", "train/train", "--watch", *options)
    assert done.returncode == 0, done.stdout + done.stderr
    named = re.search("UUID: ([0-9a-f-]{36})", done.stdout)
    assert named is not None
    record = find_run(served_home, named[1])
    assert record is not None
    assert (record.status, record.total_steps, record.seed) == ("completed", 2, 3)
    assert server.state(named[1])["type"] == "COMPLETED"


@pytest.mark.long  # in `make test` a person does so on Prefect's pages
def test_a_training_is_started_copied_and_not_retried_when_complete(
    server: Server, served_home: Path, cli: Callable[..., Any]
) -> None:
    parameters: Json = {
        **ARITHMETIC,
        "steps": 2,
        "name": "by REST",
        "seed": 5,
        "settings": SMALL,
        "limits": {"max_hours": 1},
    }
    flow_run = server.start("train", parameters)
    assert server.ended(flow_run, 200)["type"] == "COMPLETED"
    record = find_run(served_home, flow_run)
    assert record is not None
    assert (record.status, record.name, record.total_steps, record.seed) == (
        "completed",
        "by REST",
        2,
        5,
    )
    shown = server.ask("GET", f"/flow_runs/{flow_run}")
    assert shown["name"] == f"by REST-{record.run_id}"
    assert set(shown["tags"]) >= {"lachesis", f"run:{record.run_id}", "environment:arithmetic"}
    assert cli("status", record.run_id)["status"] == "completed"
    assert record.run_id in [one["run_id"] for one in cli("runs")["runs"]]

    retry = {"type": "SCHEDULED", "name": "AwaitingRetry"}
    retry |= {"state_details": {"scheduled_time": now_iso()}}
    body = {"state": retry, "force": True}
    server.ask("POST", f"/flow_runs/{flow_run}/set_state", body)
    state = server.ended(flow_run)
    assert state["type"] == "COMPLETED"
    assert state["message"].startswith(f"the retry was refused: run {record.run_id} has completed")
    again = find_run(served_home, flow_run)
    assert again is not None
    assert (again.status, again.attempt) == ("completed", 1)

    copy = server.start("train", {**record.spec.to_parameters(), "environment": "arithmetic"})
    copied = server.wait_for(lambda: find_run(served_home, copy), 60, "the run of the copy")
    assert copied.run_id != record.run_id
    assert (copied.name, copied.total_steps, copied.seed) == ("by REST", 2, 5)
    cli("stop", copied.run_id)
    assert server.ended(copy)["type"] in ("CANCELLED", "COMPLETED")


def test_the_command_line_submits_the_same_deployment(server, served_home, cli):
    settings = [word for line in SMALL.splitlines() for word in ("--set", line)]
    started = cli("train", "arithmetic", "--steps", "50", "--name", "by hand", *settings)
    record = json.loads((served_home / "runs" / started["run_id"] / "run.json").read_text())
    flow_run = server.ask("GET", f"/flow_runs/{record['flow_run_id']}")
    assert flow_run["deployment_id"] == server.deployment("train")
    assert flow_run["parameters"] == {
        "environment": "arithmetic",
        "profile": "embedded",
        "steps": 50,
        "name": "by hand",
        "settings": "env.batch_size=16\nenv.group_size=4\ntinker.final_evaluation=false\n"
        "tinker.use_wandb=false",
        "run_id": started["run_id"],
    }
    cli("stop", started["run_id"])
    state = server.ended(record["flow_run_id"])
    assert state["type"] == "CANCELLED"
    assert "Traceback" not in "\n".join(server.log_lines(record["flow_run_id"]))


@pytest.mark.matrix
def test_a_schedule_goes_on_from_the_best_checkpoint_of_its_last_run(
    server: Server, served_home: Path, cli: Callable[..., Any]
) -> None:
    parameters = {
        "environment": "arithmetic",
        "steps": 3,
        "from_checkpoint": "best",
        "settings": SMALL,
    }
    schedules = f"/deployments/{server.deployment('train')}/schedules"
    cron = {"cron": "* * * * *", "timezone": "UTC"}
    schedule: Any = server.ask(
        "POST", schedules, [{"schedule": cron, "active": True, "parameters": parameters}]
    )
    name = f"person-{schedule[0]['id'][:8]}"

    def find_completed():
        runs = [one for one in RunStore(served_home).all() if one.schedule == name]
        return sorted(
            (one for one in runs if one.status == "completed"), key=lambda one: one.created_at
        )

    try:
        first, second = server.wait_for(
            lambda: runs[:2] if len(runs := find_completed()) > 1 else None, 240, "two trainings"
        )
    finally:
        server.ask("DELETE", f"{schedules}/{schedule[0]['id']}")
    assert first.forked_from is None
    assert (second.forked_from or "").startswith(f"{first.run_id}@")
    for record in RunStore(served_home).all():  # A third one may have begun.
        if record.schedule == name and not record.has_ended:
            cli("stop", record.run_id, "--now")


@pytest.mark.matrix
def test_the_automation_of_the_documentation_trains_again(
    server: Server, served_home: Path, cli: Callable[..., Any]
) -> None:
    documentation = (ROOT / "docs" / "how-to" / "prefect.md").read_text()
    example = re.search("again.json <<'END'\n(.*?)\nEND", documentation, re.DOTALL)
    assert example is not None
    automation = json.loads(example[1].replace('"ID"', json.dumps(server.deployment("train"))))
    automation_id = server.ask("POST", "/automations/", automation)["id"]
    run_ids_before = {record.run_id for record in RunStore(served_home).all()}
    try:
        cli("test", "arithmetic", "--steps", "8")
        record = server.wait_for(
            lambda: next(
                (
                    candidate
                    for candidate in RunStore(served_home).all()
                    # The schedule of the test before may have begun one more.
                    if candidate.run_id not in run_ids_before and candidate.schedule is None
                ),
                None,
            ),
            90,
            "a training",
        )
    finally:
        server.ask("DELETE", f"/automations/{automation_id}")
    assert (record.environment, record.total_steps) == ("arithmetic", 20)
    assert record.require_validation
    flow_run = server.ask("GET", f"/flow_runs/{record.flow_run_id}")
    assert flow_run["created_by"]["type"] == "AUTOMATION"
    server.wait_for(
        lambda: RunStore(served_home).load(record.run_id).status != "pending", 60, "its start"
    )
    cli("stop", record.run_id, "--now")
    assert server.ended(record.flow_run_id)["name"] == "Cancelled"
