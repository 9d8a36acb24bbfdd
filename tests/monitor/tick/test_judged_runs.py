"""The tick judges what a run has learned, during the run and after its end."""

import json
import time

import pytest

from lachesis.base.timestamps import now_iso
from lachesis.config import run_config as run_config
from lachesis.monitor.tick import Monitor
from lachesis.monitor.tick_memory import load_memory
from lachesis.operations.run_lists import list_runs_with_warning
from lachesis.operations.runs import get_results, get_status
from lachesis.runs.metrics import MetricsFile
from lachesis.runs.store import RunStore
from lachesis.trainer.batch.advantages import compute_learning_rate


def test_broken_learning_stops_only_who_wants_it(store, make, asked):
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


def rate_of(schedule, step):
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
def test_updates_whose_rate_is_too_small_to_be_seen_stop_no_run(store, make, asked, rates, change):
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


def test_a_verifier_that_always_raises_is_never_healthy(store, make):
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
    store, make, monkeypatch, status
):
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
def test_a_resumed_run_is_judged_by_its_own_steps(store, make, asked, monkeypatch, made):
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


def test_a_verifier_that_begins_to_raise_is_seen_without_another_step(store, make):
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


def test_rewards_that_never_differ_are_named_before_the_first_step(store, make):
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
    store, make, status, steps, word, evidence
):
    make(alive=False, status=status, ended_at=now_iso(), error="the model could not be loaded")
    for step in range(1, steps + 1):
        MetricsFile(store.dir("0123abcd").metrics).append(step, {"reward/mean": step / 60})
    answer = get_status(RunStore(store.home), "0123abcd").to_payload()
    assert (answer["health"]["word"], answer["health"]["evidence"][0]) == (word, evidence)
    record = store.load("0123abcd")
    assert (record.learning, (record.health or {})["final"]) == (word, True)
    if word == "unknown":
        assert (record.health or {})["evidence"][1] == "the model could not be loaded"


def test_a_flow_that_died_is_judged_by_whoever_looks_first(store, make):
    """Thirty steps of reward 0 that ended between two looks of the monitor."""
    make(alive=False)
    for step in range(1, 31):
        values = {"reward/mean": 0.0, "batch/zero_signal_share": 1.0, "batch/rollouts": 32}
        MetricsFile(store.dir("0123abcd").metrics).append(step, values)
    (record,), _ = list_runs_with_warning(RunStore(store.home))
    assert (record.status, record.learning) == ("failed", "suspect")
    assert store.load("0123abcd").learning == "suspect"


def test_the_word_of_the_release_before_is_judged_again(store, make):
    """It called every run healthy that had not been judged."""
    before = {
        "word": "healthy",
        "evidence": ["not judged yet: 0 of at least 5 steps"],
        "at": now_iso(),
    }
    make(alive=False, status="failed", ended_at=now_iso(), error="gone", health=before)
    assert get_results(RunStore(store.home), "0123abcd").to_payload()["health"]["word"] == "unknown"


def test_only_new_lines_are_read_and_a_step_made_again_counts_once(store, make):
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
