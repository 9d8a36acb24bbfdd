"""Records on disk."""

import contextlib
import fcntl
import multiprocessing
import os
import stat
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lachesis.base.errors import RunStateError, StorageError, UnknownRunError
from lachesis.base.files import write_private
from lachesis.runs import store as store_module
from lachesis.runs.end_causes import EndCause
from lachesis.runs.ending import end_run
from lachesis.runs.host_clock import ClockReading, read_boot_id
from lachesis.runs.metrics import MetricsFile, sample_history
from lachesis.runs.record import get_attempt_duration_s
from lachesis.runs.store import RunStore
from tests.harness.home import make_record


def record(run_id="0123abcd", **changes):
    values = {
        "run_id": run_id,
        "environment": "arithmetic",
        "environment_file": "a.py",
        "profile": "embedded",
    }
    values |= {
        "base_model": "m",
        "total_steps": 3,
        "seed": 0,
        "wandb_project": "p",
        "wandb_run_name": "n",
    }
    return make_record(**{**values, **changes})


def bump(home, name):
    store = RunStore(home)
    for number in range(50):
        store.update_services("0123abcd", {name: {"pid": number}})


def test_two_processes_do_not_overwrite_each_other(tmp_path):
    """The flow and a tool may change different fields at once."""
    store = RunStore(tmp_path)
    store.create(record())
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=bump, args=(tmp_path, name)) for name in ("engine", "api")]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert {name: one.pid for name, one in store.load("0123abcd").services.items()} == {
        "engine": 49,
        "api": 49,
    }


def test_a_process_that_stands_still_with_the_lock_is_told(tmp_path, monkeypatch):
    """Rather than all others standing still with it."""
    monkeypatch.setattr("lachesis.runs.store.LOCK_S", 0.2)
    store = RunStore(tmp_path)
    folder = store.create(record())
    with open(folder.path / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(StorageError, match=r"another process has locked .*\.lock"):
            store.update("0123abcd", phase="x")
    assert store.update("0123abcd", phase="x").phase == "x"


def test_the_records_folder_is_private(tmp_path):
    folder = RunStore(tmp_path).create(record())
    write_private(folder.config, "x: 1\n")
    assert stat.S_IMODE(folder.config.stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700


def test_a_damaged_record_is_named(tmp_path):
    store = RunStore(tmp_path)
    store.create(record()).record.write_bytes(b"\xff{")
    with pytest.raises(StorageError, match=r"run\.json is damaged"):
        store.load("0123abcd")


def test_a_run_is_alive_while_somebody_holds_it(tmp_path):
    """A second flow waits for the first one, and gives up in time."""
    folder = RunStore(tmp_path).create(record())
    assert not folder.is_alive()
    with folder.hold_alive_lock() as descriptor:
        assert os.fstat(descriptor)
        assert folder.is_alive()
        with (
            pytest.raises(RunStateError, match="run 0123abcd is still held by another flow"),
            folder.hold_alive_lock(timeout_s=0.3),
        ):
            pass
    assert not folder.is_alive()


def test_the_end_of_one_attempt_is_not_that_of_the_next(tmp_path):
    """Who saw the old flow run's end may write it only after somebody has resumed the run."""
    store = RunStore(tmp_path)
    store.create(record("abcd1234", attempt=2))
    second = store.load("abcd1234")
    first = second.model_copy(update={"attempt": 1})
    assert end_run(store, first, EndCause.PERSON).status == "pending"
    assert end_run(store, second, EndCause.PERSON).status == "stopped"
    assert end_run(store, second, EndCause.FAILED).status == "stopped", "a run ends once"


def test_hours_are_counted_by_a_clock_that_nobody_sets(tmp_path):
    """The time of day was set by a day since the run began; then the host was started anew; then
    the run ended unseen.
    """
    yesterday = (datetime.now(UTC) - timedelta(days=1)).isoformat()
    began = record(
        status="running",
        started_at=yesterday,
        began_monotonic_s=time.monotonic() - 60,
        boot_id=read_boot_id(),
    )
    assert get_attempt_duration_s(began) == pytest.approx(60, abs=5)
    anew = began.model_copy(update={"boot_id": "another boot"})
    assert get_attempt_duration_s(anew) == pytest.approx(86400, abs=5)
    tomorrow = (datetime.now(UTC) + timedelta(days=1)).isoformat()
    assert get_attempt_duration_s(anew.model_copy(update={"started_at": tomorrow})) == 0
    store = RunStore(tmp_path)
    folder = store.create(anew)
    for file in (folder.record, folder.metrics):
        file.touch()
        os.utime(file, (time.time() - 82800,) * 2)
    ended = end_run(store, store.load("0123abcd"), EndCause.FLOW_LOST)
    assert get_attempt_duration_s(ended) == pytest.approx(3600, abs=5), "until it wrote last"


@given(
    uptime=st.floats(0, 1e6),
    events=st.lists(
        st.one_of(
            st.tuples(st.just("pass"), st.floats(0, 1e6)),
            st.tuples(st.just("set the time"), st.floats(-1e6, 1e6)),
            st.tuples(st.just("boot"), st.floats(0, 1e5)),
        ),
        max_size=12,
    ),
    attempt_duration_s=st.none() | st.floats(0, 1e6),
)
def test_seconds_are_those_that_passed(uptime, events, attempt_duration_s):
    """Whatever the clocks do. A boot leaves the time of day as the only clock, so its corrections
    count from then on.
    """
    passed, boot, monotonic, ahead, began_at = 0.0, 0, uptime, 0.0, datetime(2026, 1, 1, tzinfo=UTC)
    began = record(
        status="running",
        started_at=began_at.isoformat(),
        began_monotonic_s=monotonic,
        boot_id="boot 0",
    )
    for event, seconds in events:
        if event == "pass":
            passed, monotonic = passed + seconds, monotonic + seconds
        elif event == "set the time":
            ahead += seconds
        else:  # the host was off for so long
            passed, boot, monotonic = passed + seconds, boot + 1, 5.0
    clocks = ClockReading(f"boot {boot}", monotonic, began_at + timedelta(seconds=passed + ahead))
    expected = passed if boot == 0 else max(0.0, passed + ahead)
    assert get_attempt_duration_s(began, clocks) == pytest.approx(expected, abs=1e-3)
    ended = began.model_copy(
        update={
            "status": "failed",
            "attempt_duration_s": attempt_duration_s,
            "ended_at": clocks.now.isoformat(),
        }
    )
    at_end = max(0.0, passed + ahead) if attempt_duration_s is None else attempt_duration_s
    assert get_attempt_duration_s(ended) == pytest.approx(at_end, abs=1e-3), (
        "an end does not move any more"
    )


def look_often(home, count, answers):
    folder = RunStore(home).dir("0123abcd")
    answers.put(sum(folder.is_alive() for _ in range(count)))


@pytest.mark.parametrize("held", [False, True])
def test_those_who_look_do_not_take_each_other_for_the_run(tmp_path, held):
    folder = RunStore(tmp_path).create(record())
    context, count = multiprocessing.get_context("spawn"), 2000
    answers: multiprocessing.Queue[int] = context.Queue()
    with folder.hold_alive_lock() if held else contextlib.nullcontext(folder.lock.touch()):
        lookers = [
            context.Process(target=look_often, args=(tmp_path, count, answers)) for _ in range(4)
        ]
        for looker in lookers:
            looker.start()
        alive = [answers.get(timeout=60) for _ in lookers]
        for looker in lookers:
            looker.join()
    assert alive == [count if held else 0] * len(lookers)


def test_a_flow_gets_its_run_while_others_look_at_it(tmp_path):
    folder = RunStore(tmp_path).create(record())
    folder.lock.touch()
    context = multiprocessing.get_context("spawn")
    answers: multiprocessing.Queue[int] = context.Queue()
    lookers = [
        context.Process(target=look_often, args=(tmp_path, 20_000, answers)) for _ in range(3)
    ]
    for looker in lookers:
        looker.start()
    with folder.hold_alive_lock():
        assert folder.is_alive()
    for looker in lookers:
        answers.get(timeout=60)
        looker.join()


def test_an_unknown_run_names_those_there_are(tmp_path):
    store = RunStore(tmp_path)
    store.create(record())
    store.create(record("ffff0000", status="completed"))
    with pytest.raises(UnknownRunError, match=r"no run '\.\./\.\./etc'; existing runs: ") as caught:
        store.load("../../etc")
    assert caught.value.details == {"active_runs": ["0123abcd"]}


def test_runs_are_listed_the_newest_first_and_damaged_ones_left_out(tmp_path):
    store = RunStore(tmp_path)
    store.create(record(created_at="2026-01-01T00:00:00+00:00"))
    store.create(record("ffff0000", created_at="2026-01-02T00:00:00+00:00"))
    (store.root / "broken").mkdir()
    (store.root / "broken" / "run.json").write_bytes(b"\xff\xfe{")
    assert [one.run_id for one in store.all()] == ["ffff0000", "0123abcd"]


def test_a_record_is_opened_again_only_after_it_has_changed(tmp_path, monkeypatch):
    """By this process or another, also where the clock stands still or goes back."""
    store, opened = RunStore(tmp_path), list[str]()

    def open_and_note(file, mode):
        opened.append(file)
        return open(file, "rb")

    monkeypatch.setattr(store_module, "open", open_and_note, raising=False)
    written = record()
    file = store.create(written).record
    assert store.load("0123abcd") == written
    assert opened == [], "what this process has written is known to it"
    write_private(file, file.read_text().replace('"seed": 0', '"seed": 8'))
    assert [store.load("0123abcd").seed for _ in range(3)] == [8] * 3
    assert store.all() == [store.load("0123abcd")]
    assert opened == [str(file)]
    later_ns = file.stat().st_mtime_ns + 10**12
    os.utime(file, ns=(later_ns, later_ns))
    for note in ("one", "two"):
        assert store.update("0123abcd", note=note).note == note
        assert store.load("0123abcd").note == note
    assert file.stat().st_mtime_ns == later_ns + 2
    write_private(file, file.read_text().replace("two", "six"))
    assert store.load("0123abcd").note == "six"
    store.discard("0123abcd")
    assert store.all() == []
    assert not [kept for kept in store_module._kept_records if kept.startswith(str(tmp_path))]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full is a Linux device")
def test_a_disk_that_refuses_a_write_is_told_and_the_old_record_stays(tmp_path):
    store = RunStore(tmp_path)
    folder = store.create(record())
    metrics = folder.path / "full.jsonl"
    os.symlink("/dev/full", metrics)
    with pytest.raises(
        StorageError, match=r"full\.jsonl: No space left on device; check the free space"
    ):
        MetricsFile(metrics).append(1, {"reward/mean": 1.0})
    blocker = tmp_path / "file"
    blocker.write_text("")
    with pytest.raises(StorageError, match="Not a directory"):
        write_private(blocker / "run.json", "{}")
    assert store.load("0123abcd").status == "pending"


def test_a_resumed_run_leaves_behind_the_steps_it_makes_again_and_a_line_that_was_cut(tmp_path):
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    for step, reward in ((1, 0.1), (2, 0.2), (3, 0.3), (4, 0.4)):
        metrics.append(step, {"reward/mean": reward})
    with metrics.path.open("a") as file:
        file.write('{"step": 5, "rew')
    for step, reward in ((2, 0.7), (3, 0.8)):  # resumed from the checkpoint of step 1
        metrics.append(step, {"reward/mean": reward})
    assert [(one["step"], one["reward/mean"]) for one in metrics.read()] == [
        (1, 0.1),
        (2, 0.7),
        (3, 0.8),
    ]


def test_a_history_has_ten_samples_with_both_ends():
    steps = [{"step": step} for step in range(1, 101)]
    assert [one["step"] for one in sample_history(steps)] == [
        1,
        12,
        23,
        34,
        45,
        56,
        67,
        78,
        89,
        100,
    ]
    assert sample_history(steps[:3]) == steps[:3]
