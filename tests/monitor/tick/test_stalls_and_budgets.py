"""The tick finds stalled runs and exceeded budgets, whatever is wrong with other runs."""

import json
import subprocess
import time
from collections.abc import Callable

import psutil
import pytest

from lachesis.config import run_config as run_config
from lachesis.monitor import tick
from lachesis.monitor.tick import Monitor
from lachesis.monitor.tick_memory import load_memory
from lachesis.runs.host_clock import read_boot_id
from lachesis.runs.metrics import MetricsFile
from lachesis.runs.record import ServiceRecord
from lachesis.runs.store import RunStore
from tests.monitor.tick.runs import frozen


def test_a_frozen_process_goes_on_by_the_command_that_is_named(store, make):
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
def test_a_stall_is_told_and_its_policy_followed(store, make, asked, policy, asks, resumes):
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


def test_a_memory_from_before_the_host_was_started_anew_holds_no_clock(store, make):
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


def test_a_clock_that_was_set_makes_no_stall(store, make, asked):
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


def test_a_run_that_stalls_for_ever_is_not_resumed_for_ever(store, make, asked):
    make(limits={"on_stall": "resume"}, auto_resumes=tick.MAX_AUTO_RESUMES)
    frozen(store, "0123abcd")
    Monitor(store).tick()
    assert asked
    assert store.load("0123abcd").resume_requested is False


def test_a_used_budget_is_told_and_left_to_the_supervision(store, make, asked):
    make(limits={"max_tokens": 5000, "max_hours": 0.5}, earlier_hours=1.0, started_at=None)
    MetricsFile(store.dir("0123abcd").metrics).append(1, {"tokens/sampled_total": 6000.0})
    Monitor(store).tick()
    assert asked == []
    used = (store.load("0123abcd").health or {})["budget"]
    assert used == {"hours": 2.0, "tokens": 1.2}


def test_damage_in_one_run_does_not_blind_the_tick(store, make):
    make("0123abcd")
    make("4567abcd")
    store.dir("4567abcd").config.write_text("{")
    store.dir("4567abcd").metrics.write_bytes(b'\xff\xfe\n{"step": 1\n')
    store.dir("4567abcd").get_counters_file("environment").write_text("[")
    (store.dir("4567abcd").path / "monitor.json").write_text('{"silent_since": 3}')
    (store.root / "89ababcd").mkdir()
    (store.root / "89ababcd" / "run.json").write_text("{")
    assert {one.record.run_id for one in Monitor(store).tick()} == {"0123abcd", "4567abcd"}


def test_files_that_cannot_be_read_do_not_blind_the_tick(store, make):
    """Folders in the places of files, and YAML that is none."""
    make("0123abcd")
    make("4567abcd")
    store.dir("4567abcd").metrics.mkdir()
    store.dir("4567abcd").get_counters_file("environment").mkdir()
    store.dir("4567abcd").config.write_bytes(b"\xff[" * 5000)
    (store.dir("4567abcd").path / "monitor.json").mkdir()
    assert {one.record.run_id for one in Monitor(store).tick()} == {"0123abcd", "4567abcd"}
    assert store.load("0123abcd").learning == "too early"


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
def test_whatever_is_wrong_with_one_run_the_others_are_watched(store, make, asked, damage):
    make(BAD)
    make("0600d000", limits={"on_stall": "stop"})
    frozen(store, "0600d000")
    DAMAGE[damage](store)
    seen = {one.record.run_id: one for one in Monitor(store).tick()}
    assert [run_id for run_id, _ in asked] == ["0600d000"]
    assert store.load("0600d000").health is not None
    if damage == "a configuration that is none":
        assert any(
            text.startswith("its budgets and policies are not enforced")
            for text in seen[BAD].messages
        )
