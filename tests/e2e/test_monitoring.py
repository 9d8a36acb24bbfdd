"""A run is watched by real ticks of the deployed monitor: stalls, judgement, pages in a real
browser, notices.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from flows.monitor import delete_old_ticks
from lachesis.base.json_text import Json
from lachesis.base.timestamps import now_iso
from lachesis.monitor.learning_rules import judge_learning
from lachesis.monitor.tick import Monitor
from lachesis.runs.store import RunStore
from tests.harness.http_answers import serve_answers
from tests.harness.prefect_api import Server
from tests.harness.waiting import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(1200)]
CHROMIUM = next(
    (
        found
        for name in ("chromium", "chromium-browser", "google-chrome")
        if (found := shutil.which(name))
    ),
    None,
)
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking",
         "--disable-component-update", "--disable-sync", "--virtual-time-budget=9000")  # fmt: skip


@pytest.fixture(scope="module")
def server(served_home):
    return Server(served_home)


@pytest.fixture(scope="module")
def told(cli):
    """Collect what a web address was sent since `lachesis notifications`."""
    heard: list[Json] = []

    def hear(request):
        heard.append(request.json())
        return {}

    with serve_answers(hear) as url:
        assert len(cli("notifications", "set", f"{url}/hook")["automations"]) == 5
        yield heard


def record(home, run_id):
    return dict(json.loads((home / "runs" / run_id / "run.json").read_text()))


def steps(home, run_id):
    file = home / "runs" / run_id / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


# The tests below until `run` need no run; one that trains meanwhile would make each of them slower.


def test_the_end_of_a_run_is_told(told, server):
    """Failed, stopped and finished, by the server's own automations; the flow runs are of the
    training deployment and never start.
    """
    tomorrow = (datetime.now(UTC) + timedelta(days=1)).isoformat()
    kinds = {"Failed", "Cancelled", "Completed"}
    for kind in kinds:
        made = server.start(
            "train", {"environment": "arithmetic"}, state_details={"scheduled_time": tomorrow}
        )
        state = {"type": kind.upper(), "name": kind, "message": f'{kind} with "words"'}
        server.ask("POST", f"/flow_runs/{made}/set_state", {"state": state, "force": True})

    def all_told():
        found = [one for one in told if one["message"] == f'{one["event"]} with "words"']
        return found if {one["event"] for one in found} == kinds else None

    for one in wait_until(all_told, 20, "the notices"):
        assert one["page"].startswith(server.url.removesuffix("/api"))


def test_old_ticks_are_removed(cli, server):
    """Those that are old enough, and only ended ones of this deployment. `cli` names the home."""
    deployment = server.deployment("monitor")
    wanted = {
        "deployments": {"id": {"any_": [deployment]}},
        "flow_runs": {"state": {"type": {"any_": ["COMPLETED"]}}},
    }
    server.tick()
    there = len(server.ask("POST", "/flow_runs/filter", wanted))
    assert there
    assert delete_old_ticks(deployment, timedelta(hours=1)) == 0
    assert delete_old_ticks(deployment, timedelta(0)) >= there
    assert server.ask("POST", "/flow_runs/filter", wanted) == []


def test_environments_are_validated_at_night(served_home, server):
    """Those that the launcher was told, each as a flow run of its own, with a verdict; asked for by
    hand here.
    """
    known = set((served_home / "inference_tests").glob("*"))
    state = server.ended(server.start("nightly"))
    assert state["type"] == "COMPLETED", state
    made = {
        json.loads((one / "test.json").read_text())["request"]["environment"]: one
        for one in _new(served_home, known)
    }
    assert set(made) == {"arithmetic", "format_json"}
    assert server.ended((made["arithmetic"] / "flow_run_id").read_text())["type"] == "COMPLETED"
    result = json.loads((made["arithmetic"] / "test.json").read_text())["result"]
    assert [one["scale"] for one in result["models_tested"]] == ["embedded"]
    assert result["summary"]["verdict"] == "learnable"


def _new(home, known):
    return set((home / "inference_tests").glob("*")) - known


@pytest.fixture(scope="module")
def run(cli, served_home, calm):
    """A run that trains; its id."""
    small = {
        "batch_size": 32,
        "group_size": 8,
        "total_steps": 5000,
        "final_evaluation": "false",
        "use_wandb": "false",
    }
    edits = [
        word
        for name, value in (small | {"limits.on_stall": "resume"}).items()
        for word in ("--set", f"{name}={value}")
    ]
    run_id = cli("train", "calm", "--model", "tiny", *edits, LACHESIS_ENVIRONMENTS=calm)["run_id"]
    wait_until(lambda: len(steps(served_home, run_id)) >= 10, 120, "ten steps")
    yield run_id
    assert cli("stop", run_id, "--now")["status"] == "stopped"


@pytest.fixture(scope="module")
def broken_run(run, served_home, server):
    """The run after 22 steps in which its weights stayed as they were."""
    before = len(steps(served_home, run))
    (served_home / "runs" / run / "engine" / "freeze-weights").touch()
    wait_until(
        lambda: len(steps(served_home, run)) >= before + 22, 120, "22 steps without an update"
    )
    assert judge_learning(steps(served_home, run)[: before + 21]).word == "broken", (
        "within 20 steps"
    )
    server.tick()
    return run


def test_a_run_that_learns_is_healthy(run, served_home, server):
    server.tick()
    health = record(served_home, run)["health"]
    assert (health["word"], health["stalled"]) == ("healthy", None)


@pytest.mark.matrix
def test_a_frozen_environment_is_named_and_the_run_resumed(
    run: str, told: list[Json], served_home: Path, server: Server
) -> None:
    """By the first tick named, on its page and to the web address of the notices, and asked to end;
    by a later one resumed.
    """
    environment = record(served_home, run)["services"]["environment"]["pid"]
    os.kill(environment, signal.SIGSTOP)
    server.tick()
    stalled = record(served_home, run)["health"]["stalled"]
    assert stalled["part"] == "environment"
    assert f"environment (pid {environment})" in stalled["evidence"]
    wait_until(
        lambda: [one for one in told if one["event"] == "lachesis.run.stalled"],
        20,
        "the notice of the stall",
    )
    wait_until(
        lambda: record(served_home, run)["status"] == "stopped", 90, "the end, with a checkpoint"
    )
    before = len(steps(served_home, run))
    server.tick()
    wait_until(lambda: len(steps(served_home, run)) > before + 5, 180, "steps after the resume")
    again = record(served_home, run)
    assert (again["status"], again["attempt"], again["auto_resumes"]) == ("running", 2, 1)


def test_a_server_that_hangs_stops_neither_the_run_nor_the_monitor(run, served_home, server):
    """It is stopped by a signal, so that it accepts and does not answer; a tick still judges, and
    the next one publishes.
    """
    os.kill(server.pid, signal.SIGSTOP)
    try:
        before, at = len(steps(served_home, run)), now_iso()
        (seen,) = [one for one in Monitor(RunStore(served_home)).tick() if one.record.run_id == run]
        assert seen.record.status == "running"
        assert record(served_home, run)["health"]["at"] >= at
        assert len(steps(served_home, run)) > before
    finally:
        os.kill(server.pid, signal.SIGCONT)
    server.tick()
    assert record(served_home, run)["status"] == "running"


def test_ticks_do_not_pile_up(run, server):
    """Ten that are due at once, as after a night with the lid closed: the ones that meet another
    are cancelled without a process.
    """
    made = [server.start("monitor") for _ in range(10)]
    states = [server.ended(one)["type"] for one in made]
    assert set(states) == {"COMPLETED", "CANCELLED"}
    assert states.count("CANCELLED") >= 5


def test_weights_that_stay_are_called_broken(told, broken_run, cli, served_home):
    health = record(served_home, broken_run)["health"]
    assert health["word"] == "broken"
    assert "have not changed" in health["evidence"][0]
    assert record(served_home, broken_run)["status"] == "running", "advice, not a kill"
    wait_until(
        lambda: [one for one in told if one["event"] == "lachesis.run.broken"], 20, "the notice"
    )
    files = cli("report", broken_run)["files"]
    page = Path(files[0]).read_text()
    assert "<svg" in page
    assert not re.findall(r'(?:src|href)="(?!#)', page), "it needs no other file"
    assert all(Path(file).stat().st_size > 5000 for file in files)


@pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium on this machine (apt-get install chromium)"
)
def test_pages_in_a_browser(broken_run, served_home, server, tmp_path):
    """The flow run with its service tasks, the verdict and the states of its services."""
    known = json.loads((served_home / "runs" / broken_run / "monitor.json").read_text())[
        "artifacts"
    ]
    flow_run = record(served_home, broken_run)["flow_run_id"]
    (link,) = server.ask(
        "POST", "/artifacts/filter", {"artifacts": {"key": {"any_": [f"page-{broken_run}"]}}}
    )
    assert link["flow_run_id"] == flow_run
    assert re.search(rf"\(http://127\.0\.0\.1:\d+/runs/{broken_run}\)", link["data"])
    pages = {
        "run": (
            f"/runs/flow-run/{flow_run}",
            ["wait until trainer is healthy", f"run:{broken_run}"],
        ),
        "verdict": (
            f"/v2/artifacts/artifact/{known['verdict']}",
            ["It is broken.", "have not changed"],
        ),
        "status": (f"/v2/artifacts/artifact/{known['status']}", ["trainer", "training"]),
    }
    for name, (path, expected) in pages.items():
        shot = tmp_path / f"{name}.png"
        dom = _visit(server.url.removesuffix("/api") + path, shot, tmp_path)
        missing = [text for text in expected if text not in dom]
        assert not missing, f"{name}: {missing} not on the page"
        assert shot.stat().st_size > 20_000, "an empty page is smaller"


def _visit(address, shot, folder):
    """The page after its scripts have run, and its picture."""
    options = [
        f"--user-data-dir={folder / 'chromium'}",
        "--window-size=1400,1200",
        f"--screenshot={shot}",
        "--dump-dom",
    ]
    # Its helpers outlive it for a moment, and are no processes of the home.
    env = {name: value for name, value in os.environ.items() if not name.startswith("LACHESIS_")}
    command = [str(CHROMIUM), *FLAGS, *options, address]
    done = subprocess.run(command, check=True, capture_output=True, timeout=90, env=env)
    time.sleep(0.2)  # the profile is released
    return done.stdout.decode()
