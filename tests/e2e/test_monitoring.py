"""A run is watched by real ticks of the deployed monitor: stalls, judgement, budget, pages in a real browser, a notice."""

from __future__ import annotations

import http.server
import json
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest

from flows.monitor import prune
from lachesis.monitor.learning import judge

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]
Json = dict[str, Any]
CHROMIUM = next((found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None)
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync", "--virtual-time-budget=9000")  # fmt: skip


@pytest.fixture(scope="module")
def url(served_home: Path) -> str:
    return str(json.loads((served_home / "server.json").read_text())["api_url"])


@pytest.fixture
def tick(url: str, wait_until: Callable[..., Any]) -> Callable[[], None]:
    """One tick of the deployed monitor, in a process of the runner."""
    deployment = httpx.get(f"{url}/deployments/name/monitor-training/local").json()

    def run() -> None:
        body = {"state": {"type": "SCHEDULED"}}
        made = httpx.post(f"{url}/deployments/{deployment['id']}/create_flow_run", json=body).json()["id"]
        state = wait_until(lambda: _ended(url, made), 60, "a tick")
        assert state["type"] == "COMPLETED", state

    return run


def _ended(url: str, flow_run: str) -> Json | None:
    state: Json = httpx.get(f"{url}/flow_runs/{flow_run}").json()["state"]
    return state if state["type"] in ("COMPLETED", "FAILED", "CRASHED", "CANCELLED") else None


@pytest.fixture(scope="module")
def hook() -> Iterator[tuple[str, list[Json]]]:
    """A web address that keeps what it is told."""
    told: list[Json] = []

    class Hook(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            told.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hook) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/hook", told
        server.shutdown()


def record(home: Path, run_id: str) -> Json:
    return dict(json.loads((home / "runs" / run_id / "run.json").read_text()))


def steps(home: Path, run_id: str) -> list[Json]:
    file = home / "runs" / run_id / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def test_a_watched_run(
    cli: Callable[..., Any],
    served_home: Path,
    tick: Callable[[], None],
    wait_until: Callable[..., Any],
    hook: tuple[str, list[Json]],
    url: str,
    tmp_path: Path,
) -> None:
    """Frozen with SIGSTOP, with weights that stay, out of budget, resumed; every time the page says so."""
    address, told = hook
    assert len(cli("notices", "--webhook", address)["automations"]) == 4
    small = ("--set", "batch_size=32", "--set", "group_size=8", "--set", "total_steps=5000", "--set", "tinker.use_wandb=false")
    run = cli("train", "arithmetic", *small)["run_id"]
    wait_until(lambda: len(steps(served_home, run)) >= 25, 120, "25 steps")
    tick()
    health = record(served_home, run)["health"]
    assert (health["word"], health["stalled"]) == ("healthy", None)

    environment = record(served_home, run)["services"]["environment"]["pid"]
    os.kill(environment, signal.SIGSTOP)
    tick()
    stalled = record(served_home, run)["health"]["stalled"]
    assert stalled["part"] == "environment"
    assert f"environment (pid {environment})" in stalled["evidence"]
    wait_until(lambda: [one for one in told if one["event"] == "lachesis.run.stalled"], 20, "the notice of the stall")
    os.kill(environment, signal.SIGCONT)

    before = len(steps(served_home, run))
    (served_home / "runs" / run / "engine" / "freeze-weights").touch()
    wait_until(lambda: len(steps(served_home, run)) >= before + 22, 120, "22 steps without an update")
    assert judge(steps(served_home, run)[: before + 21]).word == "broken", "within 20 steps"
    tick()
    health = record(served_home, run)["health"]
    assert health["word"] == "broken"
    assert "have not changed" in health["evidence"][0]
    _look_at_pages(served_home, run, url, tmp_path)

    assert cli("stop", run)["status"] == "stopped"
    _stops_at_its_budget(cli, served_home, run, wait_until)


def test_old_ticks_are_removed(cli: Callable[..., Any], tick: Callable[[], None], url: str) -> None:
    """Those that are old enough, and only ended ones of this deployment. `cli` names the home."""
    deployment = httpx.get(f"{url}/deployments/name/monitor-training/local").json()["id"]
    wanted = {"deployments": {"id": {"any_": [deployment]}}, "flow_runs": {"state": {"type": {"any_": ["COMPLETED"]}}}}

    def ended() -> int:
        return len(httpx.post(f"{url}/flow_runs/filter", json=wanted).json())

    tick()
    there = ended()
    assert there
    assert prune(deployment, timedelta(hours=1)) == 0
    assert prune(deployment, timedelta(0)) >= there
    assert ended() == 0


def _stops_at_its_budget(cli: Callable[..., Any], home: Path, run: str, wait_until: Callable[..., Any]) -> None:
    """A budget of some five steps' worth of tokens: a checkpoint, an end with its reason, and a resume that needs more."""
    last = steps(home, run)[-1]
    spent = sum(last[f"tokens/{kind}_total"] for kind in ("prefill", "sampled", "trained"))
    step = sum(last[f"tokens/{kind}"] for kind in ("prefill", "sampled", "trained"))
    budget = int(spent + 5 * step)
    assert cli("train", "--resume", run, "--set", f"limits.max_tokens={budget}")["run_id"] == run
    wait_until(lambda: record(home, run)["status"] == "stopped", 120, "the end of the budget")
    assert record(home, run)["error"].startswith("budget: ")
    made = steps(home, run)[-1]["step"]
    assert last["step"] < made < last["step"] + 15
    assert cli("results", run)["weights"]["step"] == made
    refused = cli("train", "--resume", run, expect=1)
    assert refused["code"] == "run_state"
    assert "has used up its budget" in refused["error"]
    cli("train", "--resume", run, "--set", f"limits.max_tokens={20 * budget}")
    wait_until(lambda: steps(home, run)[-1]["step"] > made, 90, "a step after the resume")
    assert cli("stop", run)["status"] == "stopped"
    files = cli("report", run)["files"]
    page = Path(files[0]).read_text()
    assert "<svg" in page
    assert not re.findall(r'(?:src|href)="(?!#)', page), "it needs no other file"
    assert all(Path(file).stat().st_size > 5000 for file in files)


def _look_at_pages(home: Path, run: str, url: str, folder: Path) -> None:
    """The flow run with its service tasks, the report and the overview, in a real browser."""
    if CHROMIUM is None:
        print("no Chromium on this machine: the pages were not looked at (apt-get install chromium)")
        return
    known = json.loads((home / "runs" / run / "monitor.json").read_text())["artifacts"]
    (overview,) = httpx.post(f"{url}/artifacts/filter", json={"artifacts": {"key": {"any_": ["lachesis-runs"]}}}).json()
    base = url.removesuffix("/api")
    pages = {
        "run": (f"/runs/flow-run/{record(home, run)['flow_run_id']}", ["wait for trainer", f"run:{run}"]),
        "report": (f"/v2/artifacts/artifact/{known['report']}", ["Learning: broken", "data:image/svg", "have not changed"]),
        "overview": (f"/v2/artifacts/artifact/{overview['id']}", [run, "broken"]),
    }
    for name, (path, expected) in pages.items():
        shot = folder / f"{name}.png"
        dom = _visit(base + path, shot, folder)
        missing = [text for text in expected if text not in dom]
        assert not missing, f"{name}: {missing} not on the page"
        assert shot.stat().st_size > 20_000, "an empty page is smaller"


def _visit(address: str, shot: Path, folder: Path) -> str:
    """The page after its scripts have run, and its picture."""
    profile = f"--user-data-dir={folder / 'chromium'}"
    common = [str(CHROMIUM), *FLAGS, profile, "--window-size=1400,1200"]
    subprocess.run([*common, f"--screenshot={shot}", address], check=True, capture_output=True, timeout=90)
    time.sleep(0.2)  # the profile is released
    return subprocess.run([*common, "--dump-dom", address], check=True, capture_output=True, timeout=90).stdout.decode()
