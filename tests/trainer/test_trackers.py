"""Experiment trackers: what each has written is read back with its own reader."""

import json
import sqlite3
import time

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lachesis.base.errors import FieldValueError, MissingDependencyError
from lachesis.config.field_edits import ConfigFields
from lachesis.config.run_config import resolve_run_config
from lachesis.launch import choose_model
from lachesis.supervision.services.ports import reserve_free_ports
from lachesis.trainer import trackers
from lachesis.trainer.trackers import (
    TensorBoardTracker,
    TrackioTracker,
    WandbTracker,
    create_trackers,
)
from tests.harness.waiting import wait_until

STEPS = [
    {"reward/mean": 0.25, "train/loss": 0.5},
    {"reward/mean": 0.5, "eval/percent_correct": 0.75, "eval/step": 1},
]


def log_steps(tracker):
    for step, metrics in enumerate(STEPS, 1):
        tracker.log(step, metrics)
    tracker.close(60)
    assert tracker.error is None


def test_tensorboard_reads_what_was_written(tmp_path):
    log_steps(TensorBoardTracker(tmp_path))
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    rewards = [(event.step, event.value) for event in events.Scalars("reward/mean")]
    assert rewards == [(1, 0.25), (2, 0.5)]
    held_out = [(event.step, event.value) for event in events.Scalars("eval/percent_correct")]
    assert held_out == [(1, 0.75)], "at the step of its weights"


def test_a_resumed_run_goes_on_in_tensorboard(tmp_path):
    log_steps(TensorBoardTracker(tmp_path))
    tracker = TensorBoardTracker(tmp_path)
    tracker.log(3, {"reward/mean": 1.0})
    tracker.close(60)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("reward/mean")] == [1, 2, 3]


def test_trackio_reads_what_was_written(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))
    log_steps(TrackioTracker(project="p", name="sums-0123abcd", config={"a": 1}))
    files = sorted(tmp_path.rglob("*.db"))
    assert files, sorted(tmp_path.rglob("*"))
    with sqlite3.connect(files[0]) as database:
        rows = database.execute("select step, metrics from metrics order by step").fetchall()
    assert [step for step, _ in rows] == [1, 2]
    assert json.loads(rows[0][1])["reward/mean"] == 0.25


def test_a_tracker_that_fails_does_not_end_training(tmp_path):
    (tmp_path / "tensorboard").write_text("a file where a folder should be")
    tracker = TensorBoardTracker(tmp_path)
    tracker.log(1, {"reward/mean": 0.5})
    tracker.close(60)
    assert tracker.error is not None
    assert "TensorBoard logging stopped" in tracker.error
    assert "metrics.jsonl is still written" in tracker.error


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"use_wandb": False}, []),
        ({"use_wandb": True}, ["wandb"]),
        ({"use_wandb": False, "trackers": ["tensorboard", "trackio"]}, ["tensorboard", "trackio"]),
        ({"use_wandb": False, "trackers": ["tensorboard", "wandb"]}, ["wandb", "tensorboard"]),
        ({"use_wandb": True, "trackers": ["wandb"]}, ["wandb"]),
    ],
)
def test_a_configuration_names_the_trackers(fields, names):
    config = resolve_run_config("sums", "embedded", {"tinker": fields}, model="m")
    assert config.tinker.tracker_names == names
    assert config.tinker.use_wandb == ("wandb" in names)


def test_only_the_named_trackers_are_opened(tmp_path):
    fields = {"tinker": {"use_wandb": False, "trackers": ["tensorboard"]}}
    config = resolve_run_config("sums", "embedded", fields, model="m")
    opened = create_trackers(config, tmp_path)
    assert [type(tracker) for tracker in opened.trackers] == [TensorBoardTracker]
    assert opened.wandb is None
    opened.log(1, {"reward/mean": 0.5})
    opened.close()
    assert list((tmp_path / "tensorboard").iterdir())


def test_an_unknown_tracker_is_refused():
    fields = ConfigFields("embedded")
    assert fields.check_edit("trackers", "[tensorboard]")[1] == ["tensorboard"]
    with pytest.raises(FieldValueError, match="mlflow"):
        fields.check_edit("trackers", "[mlflow]")


def test_a_tracker_that_is_not_installed_is_refused_before_the_start(monkeypatch):
    fields = {"tinker": {"trackers": ["tensorboard"]}}
    config = resolve_run_config("sums", "embedded", fields, model="m")
    choose_model.require_trackers(config)
    monkeypatch.setitem(choose_model.TRACKER_MODULES, "tensorboard", "no_such_module")
    with pytest.raises(MissingDependencyError, match=r"lachesis-rl\[trackers\]"):
        choose_model.require_trackers(config)


def test_wandb_that_is_away_is_kept_offline(tmp_path, monkeypatch):
    """The real client against a port where nobody listens; no line is lost, and what to do is
    said.
    """
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{reserve_free_ports(1)[0]}")
    monkeypatch.setattr(trackers, "INIT_TIMEOUT_S", 2.0)
    started = time.monotonic()
    tracker = WandbTracker(tmp_path, project="p", group=None, name="n", config={"a": 1})
    for step in range(1, 4):
        tracker.log(step, {"reward/mean": 0.25})
    assert time.monotonic() - started < 1, "training does not wait"
    tracker.close(50)
    assert tracker.error is not None
    assert "wandb sync" in tracker.error
    assert "k" * 40 not in tracker.error
    (kept,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    # W&B's own process writes it a moment after the end
    wait_until(lambda: b"reward/mean" in kept.read_bytes(), 20)


def test_nothing_is_queued_for_a_wandb_that_has_failed(tmp_path, monkeypatch):
    """A run of many steps would keep all their metrics in memory."""
    monkeypatch.setenv("WANDB_MODE", "no such mode")
    tracker = WandbTracker(tmp_path, project="p", group=None, name="n", config={})
    tracker.log(1, {"reward/mean": 0.5})
    tracker._thread.join(60)
    assert not tracker._thread.is_alive()
    assert tracker.error is not None
    assert "W&B logging stopped" in tracker.error
    for step in range(2, 1000):
        tracker.log(step, {"reward/mean": 0.5})
    assert tracker._queue.qsize() <= 1  # the first step, where it came before the failure
    tracker.close()
