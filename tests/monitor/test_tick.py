"""A tick on runs on disk: policies, budgets, leftovers. No server is there, which keeps nothing but
publishing from being done.
"""

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

from lachesis.base.errors import ServerDownError
from lachesis.base.host_clock import read_boot_id
from lachesis.base.timestamps import now_iso
from lachesis.config import run_config as run_config
from lachesis.monitor import tick
from lachesis.monitor.monitor_memory import load_memory
from lachesis.monitor.tick import Monitor
from lachesis.orchestration import resuming, submit
from lachesis.runs.leftovers import MARK_VARIABLE, build_mark
from lachesis.runs.metrics import MetricsFile
from lachesis.runs.run_record import RunRecord, ServiceRecord
from lachesis.runs.store import RunStore
from lachesis.service import LachesisService
from lachesis.trainer.advantages import compute_learning_rate
from tests.patience import deadline

Make = Callable[..., RunRecord]
Asked = list[tuple[str, str]]


@pytest.fixture
def store(tmp_path: Path) -> RunStore:
    return RunStore(tmp_path)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    """What was asked to end, and why; asking is not the tick's own work."""
    found: Asked = []
    monkeypatch.setattr(
        submit, "cancel_run", lambda store, record, reason: found.append((record.run_id, reason))
    )
    return found


def without_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a resume of a run whose flow run has ended do everything but submit it."""
    monkeypatch.setattr(resuming, "find_flow_run_to_resume", lambda record: None)
    monkeypatch.setattr(submit, "submit_run", lambda store, record: record)


@pytest.fixture
def make(store: RunStore) -> Iterator[Make]:
    """A run that trains; its lock is held until the test ends."""
    with contextlib.ExitStack() as held:

        def run(
            run_id: str = "0123abcd",
            limits: dict[str, Any] | None = None,
            *,
            alive: bool = True,
            **changes: Any,
        ) -> RunRecord:
            config = run_config.resolve_run_config(
                "e", "embedded", {"limits": limits or {}}, model="m"
            )
            values: dict[str, Any] = {
                "environment": "e",
                "environment_file": "e.py",
                "profile": "embedded",
                "base_model": "m",
            }
            values |= {
                "total_steps": 100,
                "seed": 0,
                "wandb_project": "p",
                "wandb_run_name": "n",
                "started_at": now_iso(),
            }
            values |= {
                "status": "running",
                "phase": "training",
                "flow_run_id": "f",
                "prefect_api_url": "http://127.0.0.1:1/api",
            }
            record = RunRecord.model_validate({"run_id": run_id, **values, **changes})
            store.create(record, config.to_yaml())
            if alive:
                held.enter_context(store.dir(run_id).hold_alive_lock())
            return record

        yield run


STARTED: list[subprocess.Popen[bytes]] = []
"""Processes that a test has started."""


def start(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
    """Start a process that `ended` ends after the test."""
    STARTED.append(subprocess.Popen(command, **options))
    return STARTED[-1]


def frozen(store: RunStore, run_id: str) -> None:
    """The environment has stood still for two minutes, with its last beat."""
    about = {"written_at": time.time() - 120, "last_group_at": time.time() - 120, "errors": {}}
    store.dir(run_id).get_counters_file("environment").write_text(json.dumps(about))
    process = start([sys.executable, "-c", "import time; time.sleep(600)"])
    process.send_signal(19)
    store.update(
        run_id, services={"environment": ServiceRecord(pid=process.pid, log="x", state="running")}
    )
    until = deadline(20)
    while psutil.Process(process.pid).status() != "stopped":
        assert time.monotonic() < until, "the process was not stopped"
        time.sleep(0.02)


@pytest.fixture(autouse=True)
def ended() -> Iterator[None]:
    yield
    while STARTED:
        process = STARTED.pop()
        process.kill()
        process.wait()


def test_a_frozen_process_goes_on_by_the_command_that_is_named(store: RunStore, make: Make) -> None:
    make()
    frozen(store, "0123abcd")
    (seen,) = Monitor(store).tick()
    assert seen.stall is not None
    command = seen.stall.evidence.split("`")[1]
    subprocess.run(command, shell=True, check=True)
    pid = store.load("0123abcd").services["environment"].pid
    until = time.monotonic() + 10
    while psutil.Process(pid).status() == "stopped":
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("policy", "asks", "resumes"),
    [("warn", False, False), ("stop", True, False), ("resume", True, True)],
)
def test_a_stall_is_told_and_its_policy_followed(
    store: RunStore, make: Make, asked: Asked, policy: str, asks: bool, resumes: bool
) -> None:
    make(limits={"on_stall": policy})
    frozen(store, "0123abcd")
    (seen,) = Monitor(store).tick()
    health = store.load("0123abcd").health or {}
    assert health["stalled"]["part"] == "environment"
    assert any("stalled in environment" in text for text in seen.messages)
    assert [run for run, _ in asked] == (["0123abcd"] if asks else [])
    assert all("stalled: environment since" in reason for _, reason in asked)
    assert store.load("0123abcd").resume_requested is resumes
    (again,) = Monitor(store).tick()
    assert not any(text.startswith("stalled") for text in again.messages), "once per stall"


def test_a_memory_from_before_the_host_was_started_anew_holds_no_clock(
    store: RunStore, make: Make
) -> None:
    """Its readings of the monotonic clock would end a run that is held for a moment, or wait for
    ever.
    """
    make()
    Monitor(store).tick()
    file = store.dir("0123abcd").path / "monitor.json"
    remembered = {
        "stopping_since": 1.0,
        "clock_changed_at": 2.0,
        "clock_offset_s": 3.0,
        "reported_health": "healthy",
    }
    for boot, kept in ((read_boot_id(), 1.0), ("another", None), (None, None)):
        file.write_text(json.dumps({**remembered, "boot_id": boot}))
        memory = load_memory(store.dir("0123abcd"))
        assert (memory.stopping_since, memory.reported_health, memory.boot_id) == (
            kept,
            "healthy",
            read_boot_id(),
        )


def test_a_clock_that_was_set_makes_no_stall(store: RunStore, make: Make, asked: Asked) -> None:
    """By an hour, so that the environment's last beat, a second ago, is an hour old."""
    make(
        limits={"on_stall": "stop", "max_hours": 0.5},
        began_monotonic_s=time.monotonic() - 60,
        boot_id=read_boot_id(),
        started_at="2026-01-01T00:00:00+00:00",
    )
    Monitor(store).tick()
    file = store.dir("0123abcd").path / "monitor.json"
    memory = json.loads(file.read_text())
    file.write_text(
        json.dumps(
            {
                **memory,
                "clock_offset_s": memory["clock_offset_s"] - 3600,
                "silent_since": {"trainer": time.time() - 3600},
            }
        )
    )
    (seen,) = Monitor(store).tick()
    assert (seen.stall, asked) == (None, [])
    memory = json.loads(file.read_text())
    file.write_text(
        json.dumps(
            {
                **memory,
                "clock_changed_at": memory["clock_changed_at"] - 3600,
                "silent_since": {"trainer": time.time() - 3600},
            }
        )
    )
    (seen,) = Monitor(store).tick()
    assert seen.stall is not None, "later times are measured again"
    assert asked


def test_a_run_that_stalls_for_ever_is_not_resumed_for_ever(
    store: RunStore, make: Make, asked: Asked
) -> None:
    make(limits={"on_stall": "resume"}, auto_resumes=tick.MAX_AUTO_RESUMES)
    frozen(store, "0123abcd")
    Monitor(store).tick()
    assert asked
    assert store.load("0123abcd").resume_requested is False


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        ({"max_tokens": 5000}, "budget: 6,000 of 5,000 tokens"),
        ({"max_hours": 0.5}, "budget: 1 of 0.5 hours"),
        ({"max_cost_usd": 0.01}, "budget: 0.02 of 0.01 US dollars"),
        ({"max_tokens": 7000, "max_hours": 5, "max_cost_usd": 1.0}, None),
    ],
)
def test_budgets_are_kept(
    store: RunStore, make: Make, asked: Asked, limits: dict[str, Any], reason: str | None
) -> None:
    make(limits=limits, earlier_hours=1.0, started_at=None)
    totals = {
        "tokens/prefill_total": 1000,
        "tokens/sampled_total": 2000,
        "tokens/trained_total": 3000,
        "cost/total": 0.02,
    }
    MetricsFile(store.dir("0123abcd").metrics).append(1, totals)
    Monitor(store).tick()
    assert [why for _, why in asked] == ([reason] if reason else [])
    used = (store.load("0123abcd").health or {})["budget"]
    assert len(used) == len(limits)


def test_broken_learning_stops_only_who_wants_it(store: RunStore, make: Make, asked: Asked) -> None:
    for run_id, policy in (("0123abcd", "advise"), ("4567abcd", "stop")):
        make(run_id, limits={"on_learning_failure": policy})
        for step in range(1, 30):
            MetricsFile(store.dir(run_id).metrics).append(
                step, {"reward/mean": 0.5, "weights/change": 0.0, "train/learning_rate": 4e-5}
            )
    Monitor(store).tick()
    assert {run: (store.load(run).health or {})["word"] for run in ("0123abcd", "4567abcd")} == {
        "0123abcd": "broken",
        "4567abcd": "broken",
    }
    assert [(run, "learning is broken: the sampled weights" in why) for run, why in asked] == [
        ("4567abcd", True)
    ]


def rate_of(schedule: str, step: int) -> float:
    return compute_learning_rate(
        1e-3, step, 400, schedule=schedule, warmup_steps=100 if schedule == "constant" else 0
    )  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("rates", "change"),
    [
        ([rate_of("cosine", step) for step in range(340, 400)], 0.0),
        ([rate_of("linear", step) for step in range(397, 400)] * 20, 0.0),
        ([rate_of("constant", step) * 1e-3 for step in range(60)], 0.0),
        ([0.0] * 60, 0.0),
    ],
    ids=["the end of a cosine schedule", "the end of a linear schedule", "a warm-up", "rate 0"],
)
def test_updates_whose_rate_is_too_small_to_be_seen_stop_no_run(
    store: RunStore, make: Make, asked: Asked, rates: list[float], change: float
) -> None:
    """Changes of 0 below a hundredth of the highest rate: row 2 of the review stopped these
    runs.
    """
    make(limits={"on_learning_failure": "stop"})
    metrics = MetricsFile(store.dir("0123abcd").metrics)
    for step in range(1, 41):
        usual = 1e-3 if rates[0] else 0.0
        metrics.append(
            step, {"reward/mean": step / 200, "weights/change": 0.1, "train/learning_rate": usual}
        )
    for step, rate in enumerate(rates, 41):
        hidden = rate < 1e-5
        values = {
            "reward/mean": step / 200,
            "weights/change": change if hidden else rate * 50,
            "train/learning_rate": rate,
        }
        metrics.append(step, values)
    Monitor(store).tick()
    assert asked == []
    assert store.load("0123abcd").learning == "healthy"


def test_a_verifier_that_always_raises_is_never_healthy(store: RunStore, make: Make) -> None:
    """400 groups without a usable score and no step."""
    make()
    counted = {
        "written_at": time.time(),
        "invalid_rollouts": 6400,
        "rollouts": 0,
        "errors": {"ValueError: no answer": 400},
    }
    store.dir("0123abcd").get_counters_file("environment").write_text(json.dumps(counted))
    Monitor(store).tick()
    record = store.load("0123abcd")
    assert record.learning == "broken"
    assert (
        record.evidence
        == "100% of 6,400 rollouts had no usable score (ValueError: no answer, 400 times)"
    )


@pytest.mark.parametrize("status", ["starting", "running"])
def test_a_resumed_run_is_not_judged_by_the_counts_of_the_attempt_before(
    store: RunStore, make: Make, monkeypatch: pytest.MonkeyPatch, status: str
) -> None:
    """The files lie there until the new process of the environment writes, perhaps for minutes."""
    events: list[str] = []
    monkeypatch.setattr(
        Monitor, "_emit_event", lambda self, seen, what, payload: events.append(what)
    )
    counted = {"invalid_rollouts": 6400, "rollouts": 0, "errors": {"ValueError: no answer": 400}}
    make(status=status, attempt=2, limits={"on_learning_failure": "stop"})
    file = store.dir("0123abcd").get_counters_file("environment")
    file.write_text(json.dumps({**counted, "written_at": time.time() - 60}))
    (seen,) = Monitor(store).tick()
    record = store.load("0123abcd")
    assert (record.learning, record.evidence, events) == ("too early", "0 of at least 5 steps", [])
    assert seen.messages == []
    file = store.dir("0123abcd").get_counters_file("environment-other")
    file.write_text(json.dumps({**counted, "written_at": time.time()}))
    store.update("0123abcd", status="starting")
    Monitor(store).tick()
    assert (store.load("0123abcd").learning, events) == ("broken", ["broken"])


@pytest.mark.parametrize("made", [0, 4, 5])
def test_a_resumed_run_is_judged_by_its_own_steps(
    store: RunStore,
    make: Make,
    asked: Asked,
    monkeypatch: pytest.MonkeyPatch,
    made: int,
) -> None:
    """A policy must not stop it for what the attempt before did."""
    make(attempt=2, limits={"on_learning_failure": "stop"})
    metrics = MetricsFile(store.dir("0123abcd").metrics)
    with monkeypatch.context() as patch:
        an_hour_ago = time.time() - 3600
        patch.setattr(time, "time", lambda: an_hour_ago)
        for step in range(1, 31):
            metrics.append(step, {"reward/mean": step / 60, "train/loss": float("nan")})
    for step in range(31, 31 + made):
        metrics.append(step, {"reward/mean": step / 60, "train/loss": 0.1})
    Monitor(store).tick()
    assert store.load("0123abcd").learning == ("healthy" if made == 5 else "too early")
    assert asked == []
    for step in range(31 + made, 37 + made):
        metrics.append(step, {"reward/mean": step / 60, "train/loss": float("nan")})
    Monitor(store).tick()
    assert store.load("0123abcd").learning == "broken"
    assert len(asked) == 1


def test_a_verifier_that_begins_to_raise_is_seen_without_another_step(
    store: RunStore, make: Make
) -> None:
    make()
    for step in range(1, 31):
        values = {"reward/mean": step / 60, "batch/rollouts": 128, "rollouts/invalid": 0}
        MetricsFile(store.dir("0123abcd").metrics).append(step, values)
    Monitor(store).tick()
    assert store.load("0123abcd").learning == "healthy"
    counted = {
        "written_at": time.time(),
        "invalid_rollouts": 800,
        "rollouts": 30 * 128,
        "errors": {"KeyError: 'x'": 50},
    }
    store.dir("0123abcd").get_counters_file("environment").write_text(json.dumps(counted))
    Monitor(store).tick()
    assert store.load("0123abcd").learning == "broken"
    assert "since the last step had no usable score (KeyError: 'x', 50 times)" in str(
        store.load("0123abcd").evidence
    )


def test_rewards_that_never_differ_are_named_before_the_first_step(
    store: RunStore, make: Make
) -> None:
    """Row 54: such an environment trained for ever at step 0, healthy."""
    make()
    counted = {
        "written_at": time.time(),
        "dropped_rollouts": 3 * 128,
        "rollouts": 3 * 128,
        "groups": 24,
    }
    store.dir("0123abcd").get_counters_file("environment").write_text(
        json.dumps({**counted, "dropped_rollouts": 3 * 128 - 1})
    )
    Monitor(store).tick()
    assert store.load("0123abcd").learning == "too early"
    store.dir("0123abcd").get_counters_file("environment").write_text(json.dumps(counted))
    Monitor(store).tick()
    record = store.load("0123abcd")
    assert record.learning == "suspect"
    assert "left out 384 rollouts, which make 3 batches" in str(record.evidence)
    assert "group_size=32" in (record.health or {})["advice"][0]


@pytest.mark.parametrize(
    ("status", "steps", "word", "evidence"),
    [
        ("failed", 0, "unknown", "it failed after 0 of at least 5 steps"),
        ("stopped", 3, "unknown", "it was stopped after 3 of at least 5 steps"),
        ("completed", 30, "healthy", "mean reward 0.342 over the last 20 steps"),
        ("stopped", 30, "healthy", "mean reward 0.342 over the last 20 steps"),
    ],
)
def test_a_run_that_has_ended_is_judged_without_server_and_monitor(
    store: RunStore, make: Make, status: str, steps: int, word: str, evidence: str
) -> None:
    make(alive=False, status=status, ended_at=now_iso(), error="the model could not be loaded")
    for step in range(1, steps + 1):
        MetricsFile(store.dir("0123abcd").metrics).append(step, {"reward/mean": step / 60})
    answer = LachesisService(store.home).get_status("0123abcd").to_payload()
    assert (answer["health"]["word"], answer["health"]["evidence"][0]) == (word, evidence)
    record = store.load("0123abcd")
    assert (record.learning, (record.health or {})["final"]) == (word, True)
    if word == "unknown":
        assert (record.health or {})["evidence"][1] == "the model could not be loaded"


def test_a_flow_that_died_is_judged_by_whoever_looks_first(store: RunStore, make: Make) -> None:
    """Thirty steps of reward 0 that ended between two looks of the monitor."""
    make(alive=False)
    for step in range(1, 31):
        values = {"reward/mean": 0.0, "batch/zero_signal_share": 1.0, "batch/rollouts": 32}
        MetricsFile(store.dir("0123abcd").metrics).append(step, values)
    (record,), _ = LachesisService(store.home).list_runs_with_warning()
    assert (record.status, record.learning) == ("failed", "suspect")
    assert store.load("0123abcd").learning == "suspect"


def test_the_word_of_the_release_before_is_judged_again(store: RunStore, make: Make) -> None:
    """It called every run healthy that had not been judged."""
    before = {
        "word": "healthy",
        "evidence": ["not judged yet: 0 of at least 5 steps"],
        "at": now_iso(),
    }
    make(alive=False, status="failed", ended_at=now_iso(), error="gone", health=before)
    assert (
        LachesisService(store.home).get_results("0123abcd").to_payload()["health"]["word"]
        == "unknown"
    )


def test_only_new_lines_are_read_and_a_step_made_again_counts_once(
    store: RunStore, make: Make
) -> None:
    make()
    folder = store.dir("0123abcd")
    metrics = MetricsFile(folder.metrics)
    for step in range(1, 31):
        metrics.append(step, {"reward/mean": 0.5})
    Monitor(store).tick()
    read = load_memory(folder).trend.position
    assert read == folder.metrics.stat().st_size
    for step in (31, 32):
        metrics.append(step, {"reward/mean": 0.7})
    Monitor(store).tick()
    assert load_memory(folder).trend.num_steps == 32
    metrics.append(20, {"reward/mean": 0.9})
    Monitor(store).tick()
    trend = load_memory(folder).trend
    assert (trend.num_steps, trend.last_step, trend.recent_rewards[-1]) == (20, 20, 0.9)


def test_a_run_whose_flow_died_is_told_and_what_it_left_is_ended(
    store: RunStore, make: Make
) -> None:
    """Its lock is free, so flow and reaper are gone; a child of its environment lives on. A
    stranger in its folder stays.
    """
    make(alive=False)
    folder = store.dir("0123abcd").path
    (folder / ".alive").touch()
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    left = start(command, env={**os.environ, MARK_VARIABLE: build_mark(folder)})
    stranger = start(command, cwd=folder, env={**os.environ, MARK_VARIABLE: f"{folder}:guessed"})
    (seen,) = Monitor(store).tick()
    assert store.load("0123abcd").status == "failed"
    assert "its flow is gone" in str(store.load("0123abcd").error)
    assert not psutil.pid_exists(left.pid)
    left.wait(5)
    assert stranger.poll() is None
    assert any(f"ended a leftover process: {left.pid}" in text for text in seen.messages)


def test_a_run_that_was_stopped_to_go_on_is_resumed(
    store: RunStore, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(
        alive=False,
        status="stopped",
        ended_at=now_iso(),
        resume_requested=True,
        started_at="2026-01-01T00:00:00+00:00",
    )
    store.update("0123abcd", ended_at="2026-01-01T02:00:00+00:00")
    without_a_server(monkeypatch)
    (seen,) = Monitor(store).tick()
    record = store.load("0123abcd")
    assert (record.status, record.attempt, record.auto_resumes, record.resume_requested) == (
        "pending",
        2,
        1,
        False,
    )
    assert record.earlier_hours == 2.0
    assert seen.messages[0] == "begun again, as it has no checkpoint (time 1 of 3 without a person)"


def test_damage_in_one_run_does_not_blind_the_tick(store: RunStore, make: Make) -> None:
    make("0123abcd")
    make("4567abcd")
    store.dir("4567abcd").config.write_text("{")
    store.dir("4567abcd").metrics.write_bytes(b'\xff\xfe\n{"step": 1\n')
    store.dir("4567abcd").get_counters_file("environment").write_text("[")
    (store.dir("4567abcd").path / "monitor.json").write_text('{"silent_since": 3}')
    (store.root / "89ababcd").mkdir()
    (store.root / "89ababcd" / "run.json").write_text("{")
    assert {one.record.run_id for one in Monitor(store).tick()} == {"0123abcd", "4567abcd"}


def test_files_that_cannot_be_read_do_not_blind_the_tick(store: RunStore, make: Make) -> None:
    """Folders in the places of files, and YAML that is none."""
    make("0123abcd")
    make("4567abcd")
    store.dir("4567abcd").metrics.mkdir()
    store.dir("4567abcd").get_counters_file("environment").mkdir()
    store.dir("4567abcd").config.write_bytes(b"\xff[" * 5000)
    (store.dir("4567abcd").path / "monitor.json").mkdir()
    assert {one.record.run_id for one in Monitor(store).tick()} == {"0123abcd", "4567abcd"}
    assert store.load("0123abcd").learning == "too early"


def test_what_was_seen_of_an_earlier_attempt_is_forgotten(store: RunStore, make: Make) -> None:
    """An answer that was missing then would make the new attempt a stalled one at once."""
    make()
    (seen,) = Monitor(store).tick()
    assert "trainer" in seen.memory.silent_since
    (store.dir("0123abcd").path / "monitor.json").write_text(
        seen.memory.model_copy(
            update={"silent_since": {"trainer": 1.0}, "stopping_since": -1000.0}
        ).model_dump_json()
    )
    assert Monitor(store).tick()[0].stall is not None
    store.update("0123abcd", flow_run_id="g")
    (seen,) = Monitor(store).tick()
    assert (seen.stall, seen.memory.stopping_since) == (None, None)


def test_who_stops_a_run_wants_it_to_stay_so(store: RunStore, make: Make) -> None:
    make(alive=False, status="stopped", ended_at=now_iso(), resume_requested=True)
    assert LachesisService(store.home).stop("0123abcd")["status"] == "stopped"
    Monitor(store).tick()
    assert (store.load("0123abcd").status, store.load("0123abcd").attempt) == ("stopped", 1)


def test_a_run_that_cannot_be_asked_to_end_is_not_resumed_one_day(
    store: RunStore, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: Any) -> None:
        raise ServerDownError("away")

    make(limits={"on_stall": "resume"})
    frozen(store, "0123abcd")
    monkeypatch.setattr(submit, "cancel_run", refuses)
    (seen,) = Monitor(store).tick()
    assert "not done: away" in seen.messages
    assert store.load("0123abcd").resume_requested is False


def test_an_ended_run_is_looked_at_once_more_and_then_left(store: RunStore, make: Make) -> None:
    make(alive=False, status="completed", ended_at=now_iso())
    assert len(Monitor(store).tick()) == 1
    assert len(Monitor(store).tick()) == 1, (
        "its last report could not be published, as no server is there"
    )
    store.update("0123abcd", flow_run_id=None)
    assert len(Monitor(store).tick()) == 1
    assert Monitor(store).tick() == []


@pytest.mark.parametrize(
    ("policy", "resumes", "again"), [("stop", 0, False), ("resume", 0, True), ("resume", 3, False)]
)
def test_a_crashed_run_is_resumed_if_it_shall_be(
    store: RunStore,
    make: Make,
    monkeypatch: pytest.MonkeyPatch,
    policy: str,
    resumes: int,
    again: bool,
) -> None:
    """Three times at most; one that never trained would fail in the same way."""
    without_a_server(monkeypatch)
    ended = {"alive": False, "status": "failed", "ended_at": now_iso(), "auto_resumes": resumes}
    make("0123abcd", limits={"on_crash": policy}, healthy_at=now_iso(), **ended)
    make("4567abcd", limits={"on_crash": policy}, **ended)
    Monitor(store).tick()
    assert (store.load("0123abcd").status == "pending") is again
    assert store.load("0123abcd").auto_resumes == resumes + again
    assert store.load("4567abcd").status == "failed"


def test_a_crashed_run_that_its_user_stopped_stays_so(
    store: RunStore, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_a_server(monkeypatch)
    make(
        "0123abcd",
        limits={"on_crash": "resume"},
        healthy_at=now_iso(),
        alive=False,
        status="failed",
        ended_at=now_iso(),
    )
    assert "will not be resumed" in LachesisService(store.home).stop("0123abcd")["message"]
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
        BAD,
        flow_pid=-5,
        services={"trainer": ServiceRecord(pid=-1, port=10**9, log="x", state="running")},
    ),
    "the record of another run": lambda store: store.dir(BAD).record.write_text(
        store.dir(BAD).record.read_text().replace(BAD, "0000ffff")
    ),
    "a flow run that is none": lambda store: store.update(BAD, flow_run_id="../x"),
    "half an emoji": lambda store: (
        store.dir(BAD)
        .get_counters_file("environment")
        .write_text(
            json.dumps(
                {
                    "written_at": time.time(),
                    "last_group_at": time.time() - 900,
                    "errors": {"bad \ud800": 3},
                }
            )
        )
    ),
    "a configuration that is none": lambda store: store.dir(BAD).config.write_text("{"),
    "a home that remembers a list": lambda store: (store.home / "monitor.json").write_text("[]"),
}
BAD = "0bad0bad"


@pytest.mark.parametrize("damage", DAMAGE)
def test_whatever_is_wrong_with_one_run_the_others_are_watched(
    store: RunStore, make: Make, asked: Asked, damage: str
) -> None:
    make(BAD)
    make("0600d000", limits={"max_tokens": 5})
    MetricsFile(store.dir("0600d000").metrics).append(1, {"tokens/sampled_total": 10.0})
    DAMAGE[damage](store)
    seen = {one.record.run_id: one for one in Monitor(store).tick()}
    assert asked == [("0600d000", "budget: 10 of 5 tokens")]
    assert store.load("0600d000").health is not None
    if damage == "a configuration that is none":
        assert any(
            text.startswith("its budgets and policies are not enforced")
            for text in seen[BAD].messages
        )


def test_what_an_inference_test_has_left_behind_is_ended(store: RunStore, make: Make) -> None:
    """Also a child that left its parent's process group; not that of a run that lives."""
    make()
    folders = (store.home / "inference_tests" / "0a0a0a0a", store.dir("0123abcd").path)
    folders[0].mkdir(parents=True)
    stray, own = (
        start(
            [sys.executable, "-c", "import time; time.sleep(600)"],
            env={**os.environ, MARK_VARIABLE: build_mark(folder)},
            start_new_session=True,
        )
        for folder in folders
    )
    Monitor(store).tick()
    assert not psutil.pid_exists(stray.pid)
    stray.wait(5)
    assert own.poll() is None
