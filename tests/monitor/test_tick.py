"""A tick on runs on disk: policies, budgets, leftovers. No server is there, which keeps nothing but publishing from being
done."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from lachesis import config as configuration
from lachesis import launcher
from lachesis.errors import ServerDownError
from lachesis.metrics import MetricsFile
from lachesis.monitor import tick
from lachesis.monitor.tick import Monitor
from lachesis.runs import RunRecord, RunStore, ServiceRecord, now
from lachesis.service import Service
from lachesis.supervision.leftovers import MARK, mark

Make = Callable[..., RunRecord]
Asked = list[tuple[str, str]]


@pytest.fixture
def store(tmp_path: Path) -> RunStore:
    return RunStore(tmp_path)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    """What was asked to end, and why; asking is not the tick's own work."""
    found: Asked = []
    monkeypatch.setattr(launcher, "cancel", lambda store, record, reason: found.append((record.run_id, reason)))
    return found


@pytest.fixture
def make(store: RunStore) -> Iterator[Make]:
    """A run that trains; its lock is held until the test ends."""
    with contextlib.ExitStack() as held:

        def run(
            run_id: str = "0123abcd", limits: dict[str, Any] | None = None, *, alive: bool = True, **changes: Any
        ) -> RunRecord:
            config = configuration.resolve("e", "embedded", {"limits": limits or {}}, model="m")
            values: dict[str, Any] = {"environment": "e", "environment_file": "e.py", "profile": "embedded", "base_model": "m"}
            values |= {"total_steps": 100, "seed": 0, "wandb_project": "p", "wandb_run_name": "n", "started_at": now()}
            values |= {
                "status": "running",
                "phase": "training",
                "flow_run_id": "f",
                "prefect_api_url": "http://127.0.0.1:1/api",
            }
            record = RunRecord.model_validate({"run_id": run_id, **values, **changes})
            store.create(record, config.to_yaml())
            if alive:
                held.enter_context(store.dir(run_id).living())
            return record

        yield run


def frozen(store: RunStore, run_id: str) -> None:
    """The environment has stood still for two minutes, with its last beat."""
    about = {"at": time.time() - 120, "group_at": time.time() - 120, "errors": {}}
    store.dir(run_id).tally_of("environment").write_text(json.dumps(about))
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    process.send_signal(19)
    store.update(run_id, services={"environment": ServiceRecord(pid=process.pid, log="x", state="running")})
    for _ in range(100):
        if psutil.Process(process.pid).status() == "stopped":
            return
        time.sleep(0.02)


@pytest.fixture(autouse=True)
def ended() -> Iterator[None]:
    yield
    for child in psutil.Process().children():
        if "time.sleep(600)" in " ".join(child.cmdline()):
            child.kill()
            child.wait()


@pytest.mark.parametrize(("policy", "asks", "resumes"), [("warn", False, False), ("stop", True, False), ("resume", True, True)])
def test_a_stall_is_told_and_its_policy_followed(
    store: RunStore, make: Make, asked: Asked, policy: str, asks: bool, resumes: bool
) -> None:
    make(limits={"on_stall": policy})
    frozen(store, "0123abcd")
    (seen,) = Monitor(store).tick()
    health = store.load("0123abcd").health or {}
    assert health["stalled"]["part"] == "environment"
    assert any("stalled in environment" in text for text in seen.said)
    assert [run for run, _ in asked] == (["0123abcd"] if asks else [])
    assert all("stalled: environment since" in reason for _, reason in asked)
    assert store.load("0123abcd").resume_wanted is resumes
    (again,) = Monitor(store).tick()
    assert not any(text.startswith("stalled") for text in again.said), "once per stall"


def test_a_clock_that_was_set_makes_no_stall(store: RunStore, make: Make, asked: Asked) -> None:
    """By an hour, so that the environment's last beat, a second ago, is an hour old."""
    make(limits={"on_stall": "stop", "max_hours": 0.5}, began_s=time.monotonic() - 60, started_at="2026-01-01T00:00:00+00:00")
    Monitor(store).tick()
    file = store.dir("0123abcd").path / "monitor.json"
    memory = json.loads(file.read_text())
    file.write_text(
        json.dumps({**memory, "ahead_s": memory["ahead_s"] - 3600, "silent_since": {"trainer": time.time() - 3600}})
    )
    (seen,) = Monitor(store).tick()
    assert (seen.stall, asked) == (None, [])
    memory = json.loads(file.read_text())
    file.write_text(json.dumps({**memory, "set_at": memory["set_at"] - 3600, "silent_since": {"trainer": time.time() - 3600}}))
    (seen,) = Monitor(store).tick()
    assert seen.stall is not None, "later times are measured again"
    assert asked


def test_a_run_that_stalls_for_ever_is_not_resumed_for_ever(store: RunStore, make: Make, asked: Asked) -> None:
    make(limits={"on_stall": "resume"}, auto_resumes=tick.MOST_RESUMES)
    frozen(store, "0123abcd")
    Monitor(store).tick()
    assert asked
    assert store.load("0123abcd").resume_wanted is False


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        ({"max_tokens": 5000}, "budget: 6,000 of 5,000 tokens"),
        ({"max_hours": 0.5}, "budget: 1 of 0.5 hours"),
        ({"max_cost_usd": 0.01}, "budget: 0.02 of 0.01 US dollars"),
        ({"max_tokens": 7000, "max_hours": 5, "max_cost_usd": 1.0}, None),
    ],
)
def test_budgets_are_kept(store: RunStore, make: Make, asked: Asked, limits: dict[str, Any], reason: str | None) -> None:
    make(limits=limits, earlier_hours=1.0, started_at=None)
    totals = {"tokens/prefill_total": 1000, "tokens/sampled_total": 2000, "tokens/trained_total": 3000, "cost/total": 0.02}
    MetricsFile(store.dir("0123abcd").metrics).append(1, totals)
    Monitor(store).tick()
    assert [why for _, why in asked] == ([reason] if reason else [])
    used = (store.load("0123abcd").health or {})["budget"]
    assert len(used) == len(limits)


def test_broken_learning_stops_only_who_wants_it(store: RunStore, make: Make, asked: Asked) -> None:
    for run_id, policy in (("0123abcd", "advise"), ("4567abcd", "stop")):
        make(run_id, limits={"on_broken": policy})
        for step in range(1, 30):
            MetricsFile(store.dir(run_id).metrics).append(step, {"reward/mean": 0.5, "weights/change": 0.0})
    Monitor(store).tick()
    assert {run: (store.load(run).health or {})["word"] for run in ("0123abcd", "4567abcd")} == {
        "0123abcd": "broken",
        "4567abcd": "broken",
    }
    assert [(run, "learning is broken: the sampled weights" in why) for run, why in asked] == [("4567abcd", True)]


def test_a_run_whose_flow_died_is_told_and_what_it_left_is_ended(store: RunStore, make: Make) -> None:
    """Its lock is free, so flow and reaper are gone; a child of its environment lives on. A stranger in its folder stays."""
    make(alive=False)
    folder = store.dir("0123abcd").path
    (folder / ".alive").touch()
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    left = subprocess.Popen(command, env={**os.environ, MARK: mark(folder)})
    stranger = subprocess.Popen(command, cwd=folder, env={**os.environ, MARK: f"{folder}:guessed"})
    (seen,) = Monitor(store).tick()
    assert store.load("0123abcd").status == "failed"
    assert "its flow is gone" in str(store.load("0123abcd").error)
    assert not psutil.pid_exists(left.pid)
    left.wait(5)
    assert stranger.poll() is None
    assert any(f"ended what it had left behind: {left.pid}" in text for text in seen.said)


def test_a_run_that_was_stopped_to_go_on_is_resumed(store: RunStore, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    make(alive=False, status="stopped", ended_at=now(), resume_wanted=True, started_at="2026-01-01T00:00:00+00:00")
    store.update("0123abcd", ended_at="2026-01-01T02:00:00+00:00")
    monkeypatch.setattr(launcher, "submit", lambda store, record: record)
    (seen,) = Monitor(store).tick()
    record = store.load("0123abcd")
    assert (record.status, record.attempt, record.auto_resumes, record.resume_wanted) == ("pending", 2, 1, False)
    assert record.earlier_hours == 2.0
    assert "resumed from its newest checkpoint" in seen.said[0]


def test_damage_in_one_run_does_not_blind_the_tick(store: RunStore, make: Make) -> None:
    make("0123abcd")
    make("4567abcd")
    store.dir("4567abcd").config.write_text("{")
    store.dir("4567abcd").metrics.write_bytes(b'\xff\xfe\n{"step": 1\n')
    store.dir("4567abcd").tally_of("environment").write_text("[")
    (store.dir("4567abcd").path / "monitor.json").write_text('{"silent_since": 3}')
    (store.root / "89ababcd").mkdir()
    (store.root / "89ababcd" / "run.json").write_text("{")
    assert {one.record.run_id for one in Monitor(store).tick()} == {"0123abcd", "4567abcd"}


def test_files_that_cannot_be_read_do_not_blind_the_tick(store: RunStore, make: Make) -> None:
    """Folders in the places of files, and YAML that is none."""
    make("0123abcd")
    make("4567abcd")
    store.dir("4567abcd").metrics.mkdir()
    store.dir("4567abcd").tally_of("environment").mkdir()
    store.dir("4567abcd").config.write_bytes(b"\xff[" * 5000)
    (store.dir("4567abcd").path / "monitor.json").mkdir()
    assert {one.record.run_id for one in Monitor(store).tick()} == {"0123abcd", "4567abcd"}
    assert (store.load("0123abcd").health or {})["word"] == "healthy"


def test_what_was_seen_of_an_earlier_attempt_is_forgotten(store: RunStore, make: Make) -> None:
    """An answer that was missing then would make the new attempt a stalled one at once."""
    make()
    (seen,) = Monitor(store).tick()
    assert "trainer" in seen.memory.silent_since
    (store.dir("0123abcd").path / "monitor.json").write_text(
        seen.memory.model_copy(update={"silent_since": {"trainer": 1.0}, "held_since": -1000.0}).model_dump_json()
    )
    assert Monitor(store).tick()[0].stall is not None
    store.update("0123abcd", flow_run_id="g")
    (seen,) = Monitor(store).tick()
    assert (seen.stall, seen.memory.held_since) == (None, None)


def test_who_stops_a_run_wants_it_to_stay_so(store: RunStore, make: Make) -> None:
    make(alive=False, status="stopped", ended_at=now(), resume_wanted=True)
    assert Service(store.home).stop("0123abcd")["status"] == "stopped"
    Monitor(store).tick()
    assert (store.load("0123abcd").status, store.load("0123abcd").attempt) == ("stopped", 1)


def test_a_run_that_cannot_be_asked_to_end_is_not_resumed_one_day(
    store: RunStore, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: Any) -> None:
        raise ServerDownError("away")

    make(limits={"on_stall": "resume"})
    frozen(store, "0123abcd")
    monkeypatch.setattr(launcher, "cancel", refuses)
    (seen,) = Monitor(store).tick()
    assert "not done: away" in seen.said
    assert store.load("0123abcd").resume_wanted is False


def test_an_ended_run_is_looked_at_once_more_and_then_left(store: RunStore, make: Make) -> None:
    make(alive=False, status="completed", ended_at=now())
    assert len(Monitor(store).tick()) == 1
    assert len(Monitor(store).tick()) == 1, "its last report could not be published, as no server is there"
    store.update("0123abcd", flow_run_id=None)
    assert len(Monitor(store).tick()) == 1
    assert Monitor(store).tick() == []


@pytest.mark.parametrize(("policy", "resumes", "again"), [("stop", 0, False), ("resume", 0, True), ("resume", 3, False)])
def test_a_crashed_run_is_resumed_if_it_shall_be(
    store: RunStore, make: Make, monkeypatch: pytest.MonkeyPatch, policy: str, resumes: int, again: bool
) -> None:
    """Three times at most; one that never trained would fail in the same way."""
    monkeypatch.setattr(launcher, "submit", lambda store, record: record)
    ended = {"alive": False, "status": "failed", "ended_at": now(), "auto_resumes": resumes}
    make("0123abcd", limits={"on_crash": policy}, healthy_at=now(), **ended)
    make("4567abcd", limits={"on_crash": policy}, **ended)
    Monitor(store).tick()
    assert (store.load("0123abcd").status == "pending") is again
    assert store.load("0123abcd").auto_resumes == resumes + again
    assert store.load("4567abcd").status == "failed"


def test_a_crashed_run_that_its_user_stopped_stays_so(store: RunStore, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "submit", lambda store, record: record)
    make("0123abcd", limits={"on_crash": "resume"}, healthy_at=now(), alive=False, status="failed", ended_at=now())
    assert "stays so" in Service(store.home).stop("0123abcd")["message"]
    Monitor(store).tick()
    assert store.load("0123abcd").status == "failed"


DAMAGE: dict[str, Callable[[RunStore], object]] = {
    "a metric that is no float": lambda store: store.dir(BAD).metrics.write_text(
        '{"step": 1, "reward/mean": 1' + "0" * 400 + "}"
    ),
    "rewards whose sum is infinite": lambda store: store.dir(BAD).metrics.write_text(
        "".join(f'{{"step": {step}, "reward/mean": 1.7e308}}\n' for step in range(1, 61))
    ),
    "numbers that are no process and no port": lambda store: store.update(
        BAD, flow_pid=-5, services={"trainer": ServiceRecord(pid=-1, port=10**9, log="x", state="running")}
    ),
    "the record of another run": lambda store: store.dir(BAD).record.write_text(
        store.dir(BAD).record.read_text().replace(BAD, "0000ffff")
    ),
    "a flow run that is none": lambda store: store.update(BAD, flow_run_id="../x"),
    "half an emoji": lambda store: (
        store.dir(BAD)
        .tally_of("environment")
        .write_text(json.dumps({"at": time.time(), "group_at": time.time() - 900, "errors": {"bad \ud800": 3}}))
    ),
    "a configuration that is none": lambda store: store.dir(BAD).config.write_text("{"),
    "a home that remembers a list": lambda store: (store.home / "monitor.json").write_text("[]"),
}
BAD = "0bad0bad"


@pytest.mark.parametrize("damage", DAMAGE)
def test_whatever_is_wrong_with_one_run_the_others_are_watched(store: RunStore, make: Make, asked: Asked, damage: str) -> None:
    make(BAD)
    make("0600d000", limits={"max_tokens": 5})
    MetricsFile(store.dir("0600d000").metrics).append(1, {"tokens/sampled_total": 10.0})
    DAMAGE[damage](store)
    seen = {one.record.run_id: one for one in Monitor(store).tick()}
    assert asked == [("0600d000", "budget: 10 of 5 tokens")]
    assert store.load("0600d000").health is not None
    if damage == "a configuration that is none":
        assert any(text.startswith("its budgets and policies are not kept") for text in seen[BAD].said)


def test_what_an_inference_test_has_left_behind_is_ended(store: RunStore, make: Make) -> None:
    """Also a child that left its parent's process group; not that of a run that lives."""
    make()
    folders = (store.home / "inference_tests" / "0a0a0a0a", store.dir("0123abcd").path)
    folders[0].mkdir(parents=True)
    stray, own = (
        subprocess.Popen(
            [sys.executable, "-c", "import time; time.sleep(600)"],
            env={**os.environ, MARK: mark(folder)},
            start_new_session=True,
        )
        for folder in folders
    )
    Monitor(store).tick()
    assert not psutil.pid_exists(stray.pid)
    stray.wait(5)
    assert own.poll() is None
