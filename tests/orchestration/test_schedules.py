"""Schedules of trainings at a real Prefect server, and what a scheduled flow run makes of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flows import requested_runs
from flows.requested_runs import find_or_create_run
from lachesis.agent.registry import CallContext
from lachesis.agent.session import AgentSession
from lachesis.agent.tools import TOOLS
from lachesis.base.errors import ConfigError, FieldValueError, RunSkippedError
from lachesis.cli.main import main
from lachesis.orchestration import schedules
from lachesis.orchestration.prefect_api import PrefectApi
from lachesis.service import LachesisService
from tests.records import make_record

pytestmark = pytest.mark.timeout(300)
NIGHTLY = {"environment": "arithmetic", "steps": 5, "name": "my nights"}


@pytest.fixture
def home(server: str, monkeypatch: pytest.MonkeyPatch, clean_environment: Path) -> Path:
    monkeypatch.setenv("PREFECT_API_URL", server)
    monkeypatch.setenv("LACHESIS_DEPLOYMENT", "test")
    return clean_environment


def test_a_schedule_is_made_listed_and_removed(home: Path, prefect_api: PrefectApi) -> None:
    store = LachesisService(home).store
    name = schedules.create_schedule(home, "0 2 * * *", "Europe/Berlin", NIGHTLY)
    assert name.startswith("my_nights-")
    (schedule,) = [one for one in schedules.list_schedules(store) if one.name == name]
    assert (schedule.when, schedule.timezone, schedule.active) == (
        "0 2 * * *",
        "Europe/Berlin",
        True,
    )
    assert schedule.parameters == NIGHTLY
    with pytest.raises(ConfigError, match=f"no schedule 'nights'; existing: .*{name}"):
        schedules.remove_schedule(home, "nights")
    schedules.remove_schedule(home, name)
    assert name not in [one.name for one in schedules.list_schedules(store)]


def test_a_schedule_without_a_slug_has_a_name_too(home: Path, prefect_api: PrefectApi) -> None:
    """Prefect's newer page makes such; the runner gives it this name as its slug."""
    deployment: Any = prefect_api.read_deployment("train", "train-test")
    new_schedule = prefect_api.create_schedule(
        deployment["id"], {"schedule": {"interval": 3600}, "active": False}
    )
    name = f"person-{new_schedule['id'][:8]}"
    (schedule,) = [
        one for one in schedules.list_schedules(LachesisService(home).store) if one.name == name
    ]
    assert (schedule.when, schedule.active) == ("every 3600.0 s", False)
    creator = {"type": "SCHEDULE", "id": new_schedule["id"], "display_value": "IntervalSchedule"}
    assert schedules.find_schedule_of_flow_run({"created_by": creator}) == name
    assert schedules.find_schedule_of_flow_run({"created_by": {"type": "DEPLOYMENT"}}) is None
    schedules.remove_schedule(home, name)


@pytest.mark.parametrize(
    ("cron", "timezone"), [("0 25 * * *", "UTC"), ("nightly", "UTC"), ("0 2 * * *", "Mars/Base")]
)
def test_a_schedule_that_cannot_be_is_refused(home: Path, cron: str, timezone: str) -> None:
    with pytest.raises(FieldValueError, match="allowed: a cron line of five fields") as raised:
        schedules.create_schedule(home, cron, timezone, NIGHTLY)
    assert repr(cron) in str(raised.value)
    assert repr(timezone) in str(raised.value)


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> LachesisService:
    """A service whose flow runs are made by the schedule `nights`."""
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    monkeypatch.setattr(requested_runs, "_read_schedule", lambda _: "nights")
    return LachesisService()


def test_a_scheduled_run_is_skipped_while_the_one_before_it_lives(
    service: LachesisService,
) -> None:
    other = make_record(run_id="aaaaaaaa", status="running", schedule="days")
    service.store.create(other)
    first = find_or_create_run(service, NIGHTLY, None)
    assert (first.schedule, first.status) == ("nights", "pending")
    with pytest.raises(RunSkippedError, match=f"skipped: run {first.run_id} of the schedule"):
        find_or_create_run(service, NIGHTLY, None)
    (skipped,) = [one for one in service.store.all() if one.status == "stopped"]
    assert skipped.evidence == f"skipped: run {first.run_id} of the schedule nights still runs"
    service.store.mark_ended(first.run_id, "completed")
    assert find_or_create_run(service, NIGHTLY, None).status == "pending"


def test_the_first_run_of_a_schedule_starts_from_the_base_model(
    service: LachesisService,
) -> None:
    parameters = {**NIGHTLY, "from_checkpoint": "best"}
    assert find_or_create_run(service, parameters, None).forked_from is None


def test_the_last_run_of_a_schedule_is_only_known_to_a_schedule(
    service: LachesisService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requested_runs, "_read_schedule", lambda _: None)
    with pytest.raises(FieldValueError, match="from_checkpoint is 'last', which only a schedule"):
        find_or_create_run(service, {**NIGHTLY, "from_checkpoint": "last"}, None)


def test_an_agent_schedules_its_draft(home: Path, prefect_api: PrefectApi) -> None:
    context = CallContext(AgentSession("nights"))

    def ask(tool: str, **arguments: Any) -> Any:
        answer, error = TOOLS[tool].run_safely(context, arguments)
        assert error is None, answer
        return answer

    ask("rl_select_environment", name="arithmetic")
    ask("rl_edit_config", field="batch_size", value=32)
    answer = ask("rl_schedule_training", cron="0 2 * * *", start_from="best")
    assert answer["parameters"] == {
        "environment": "arithmetic",
        "profile": "embedded",
        "settings": "env.batch_size=32",
        "from_checkpoint": "best",
        "by_agent": True,
    }
    listed = ask("rl_list_schedules")
    assert answer["schedule"] in [one["name"] for one in listed["schedules"]]
    ask("rl_schedule_training", remove=answer["schedule"])
    assert answer["schedule"] not in [one["name"] for one in ask("rl_list_schedules")["schedules"]]


def test_the_command_line_schedules_a_training(
    home: Path, prefect_api: PrefectApi, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["schedule", "arithmetic", "--cron", "30 1 * * 6", "--steps", "7", "--name", "weekly"]
    assert main([*words, "--from", "last"]) == 0
    assert "starts a training at 30 1 * * 6 (UTC)" in capsys.readouterr().out
    assert main(["schedules"]) == 0
    shown = capsys.readouterr().out
    assert "30 1 * * 6 (UTC)" in shown
    assert "environment=arithmetic, profile=embedded, steps=7, name=weekly" in shown
    name = next(line.split()[0] for line in shown.splitlines() if line.startswith("weekly-"))
    assert main(["unschedule", name]) == 0
    assert main(["unschedule", name]) == 1
    assert "config: there is no schedule" in capsys.readouterr().err
    locked = ["--set", "tinker.checkpoint_dir=/tmp"]
    assert main([*words, *locked]) == 1
    assert "locked_field: tinker.checkpoint_dir is locked" in capsys.readouterr().err
