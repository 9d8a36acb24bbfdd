"""Every surface shows the same judgement of learning."""

import io
import json
import os
import re
import signal
import time
from datetime import UTC, datetime

import pytest
from rich.console import Console

from lachesis.base.timestamps import now_iso
from lachesis.cli.commands import run_status, watch
from lachesis.cli.commands.run_list import render_runs
from lachesis.cli.main import main
from lachesis.cli.terminal import localize_times
from lachesis.config import run_config as run_config
from lachesis.monitor import prefect_artifacts
from lachesis.monitor.run_health import refresh_health
from lachesis.operations.run_lists import list_runs_with_warning
from lachesis.operations.runs import get_status, observe_run, view_run
from lachesis.prefect_client import refresh
from lachesis.reporting.run_schemas import build_run_status
from lachesis.reporting.run_summary import summarize_run
from lachesis.reporting.run_view import RunView
from lachesis.runs.metrics import MetricsFile
from lachesis.runs.store import RunStore
from lachesis.web.report_file import write_report
from tests.harness.home import write_run

RUN = "0123abcd"
REASON = "ValueError: the answer has no number"
STALL = "the trainer has been waiting for samples of the engine for 100 s"
EVIDENCE = f"100% of 6,400 rollouts had no usable score ({REASON}, 400 times)"


def make(store, **changes):
    values = {"environment": "arithmetic", "total_steps": 100, "started_at": now_iso()}
    return write_run(store, **{"run_id": RUN, **values, **changes})


@pytest.fixture
def failed(store):
    """A run whose verifier always raised; nobody has judged it."""
    record = make(
        store,
        status="failed",
        phase="failed",
        ended_at=now_iso(),
        error="the environment gave no usable group",
    )
    counted = {
        "written_at": time.time(),
        "invalid_rollouts": 6400,
        "rollouts": 0,
        "errors": {REASON: 400},
    }
    store.dir(RUN).get_counters_file("environment").write_text(json.dumps(counted))
    return record


def printed(view, width=80):
    console = Console(
        file=io.StringIO(),
        width=width,
        force_terminal=True,
        color_system="standard",
        highlight=False,
    )
    console.print(view)
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def answers(capsys, *words):
    assert main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_dead_run_has_one_word_everywhere(store, failed, capsys, tmp_path):
    (row,) = answers(capsys, "runs")["runs"]
    assert (row["learning"], row["evidence"]) == ("broken", EVIDENCE)
    health = answers(capsys, "status", RUN)["health"]
    assert (health["word"], health["evidence"][0]) == ("broken", EVIDENCE)
    artifact = prefect_artifacts.render_run_verdict(view_run(store, RUN))
    assert artifact.startswith(f"# {prefect_artifacts.escape_text(store.load(RUN).title)}: broken")
    assert EVIDENCE[1:] in artifact
    page = write_report(store, RUN, tmp_path / "report").read_text()
    assert "It is broken." in page
    assert "100% of 6,400 rollouts had no usable score" in page


@pytest.mark.parametrize(
    "changes",
    [{"status": "starting"}, {"status": "pending", "started_at": None}],
    ids=["starting", "waiting"],
)
def test_a_resumed_run_shows_no_counts_of_the_attempt_before(store, capsys, changes):
    make(store, attempt=2, **changes)
    counted = {
        "written_at": time.time() - 60,
        "invalid_rollouts": 6400,
        "rollouts": 0,
        "errors": {REASON: 400},
    }
    store.dir(RUN).get_counters_file("environment").write_text(json.dumps(counted))
    record = store.load(RUN)
    answer = build_run_status(RunView(record, store.dir(RUN), [])).to_payload()
    assert answer.get("rollouts") is None
    (row,) = answers(capsys, "runs")["runs"]
    assert (row["learning"], row["evidence"]) == ("too early", "0 of at least 5 steps")


def test_metrics_that_cannot_be_read_hide_no_other_run(store, capsys):
    """A folder in their place fails to open for every user, also for root."""
    make(store)
    make(store, run_id="4567abcd")
    store.dir(RUN).metrics.mkdir()
    point = {"eval/percent_correct": 0.5, "eval/low": 0.4, "eval/high": 0.6, "eval/step": 1}
    MetricsFile(store.dir("4567abcd").metrics).append(1, point)
    rows = {row["run_id"]: row["held_out"] for row in answers(capsys, "runs")["runs"]}
    assert rows[RUN] is None
    assert rows["4567abcd"]["percent_correct"] == 0.5


def test_the_word_is_readable_in_80_columns(store, failed):
    records, _ = list_runs_with_warning(store)
    rows = [{**summarize_run(records[0], store.dir(RUN)).to_payload(), "differing": {}}]
    lines = printed(render_runs(rows, 1, 1)).splitlines()
    assert len(lines) == 4, "a head, and three lines per run"
    assert "\x1b[31mbroken" in lines[3]
    assert "100% of 6,400 rollouts had no usable score (ValueE" in lines[3]
    for view in (
        run_status.render_status(observe_run(store, RUN)),
        run_status.render_results(view_run(store, RUN)),
    ):
        shown = printed(view)
        assert "\x1b[31mbroken" in shown
        assert REASON in " ".join(shown.replace("\x1b[31m", "").replace("\x1b[0m", "").split())
    assert EVIDENCE in " ".join(printed(watch.render_panel(view_run(store, RUN)), 140).split())


@pytest.mark.parametrize(
    ("status", "word", "green"),
    [
        ("running", "too early", False),
        ("stopped", "unknown", False),
        ("completed", "healthy", True),
    ],
)
def test_only_a_run_that_was_measured_is_green(store, status, word, green):
    make(store, status=status, ended_at=None if status == "running" else now_iso())
    for step in range(1, 31) if word == "healthy" else ():
        MetricsFile(store.dir(RUN).metrics).append(step, {"reward/mean": step / 60})
    shown = printed(watch.render_panel(view_run(store, RUN)))
    assert f"verdict: {word}" in re.sub(r"\x1b\[[0-9;]*m", "", shown)
    assert ("\x1b[32m" in shown) is green
    assert (
        f"\x1b[32m{word}" in printed(run_status.render_status(observe_run(store, RUN)))
    ) is green


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_while_python_removes_an_object_is_not_forgotten(store, monkeypatch, number):
    make(store, status="running", phase="training")

    class Removed:
        def __del__(self):
            os.kill(os.getpid(), number)

    looks = []

    def look(store, run_id):
        looks.append(run_id)
        if len(looks) == 2:
            Removed()
        return store.load(run_id)

    before = [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)]
    monkeypatch.setattr(watch, "get_run", look)
    monkeypatch.setattr(watch, "REFRESH_INTERVAL_S", 0.01)
    monkeypatch.setattr(watch, "SERVER_POLL_INTERVAL_S", 0.0)
    with pytest.raises(KeyboardInterrupt):
        watch.watch_until_end(store, RUN, quiet=True)
    assert [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)] == before


def test_watching_prints_the_word_when_it_changes(store, monkeypatch, capsys):
    """Also where no monitor looks at the run."""
    make(store, status="completed", ended_at=now_iso())
    for step in range(1, 31):
        MetricsFile(store.dir(RUN).metrics).append(step, {"reward/mean": step / 60})
    console = Console(file=io.StringIO(), width=80)
    monkeypatch.setattr("lachesis.cli.terminal.console", console)
    record = watch.watch_until_end(RunStore(store.home), RUN)
    assert record.learning == "healthy"
    printed_lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert printed_lines[-1] == "verdict: healthy (mean reward 0.342 over the last 20 steps)"


@pytest.fixture
def stalled(store):
    """A run that learned well until its sampler stopped answering; the monitor has seen it."""
    make(store, status="running", phase="training", flow_run_id=None)
    began = time.time() - 130
    for step in range(1, 31):
        MetricsFile(store.dir(RUN).metrics).append(step, {"reward/mean": step / 60})
    lines = store.dir(RUN).metrics.read_text().splitlines()
    with store.dir(RUN).metrics.open("w") as file:
        for index, line in enumerate(lines):
            file.write(json.dumps({**json.loads(line), "time": began + index}) + "\n")
    health = {
        "word": "healthy",
        "evidence": ["mean reward 0.342 over the last 20 steps"],
        "advice": [],
        "step": 30,
        "at": now_iso(),
        "stalled": {"part": "sampler", "since": "2026-11-25T04:00:00+00:00", "evidence": STALL},
    }
    store.update(RUN, health=health, started_at=datetime.fromtimestamp(began - 5, UTC).isoformat())
    return store.load(RUN)


def test_a_run_that_stands_still_is_nowhere_green(store, stalled, monkeypatch, capsys, tmp_path):
    """Each place that shows the word shows the stall, and no time that is left."""
    monkeypatch.setattr(refresh, "refresh_runs", lambda store, records: (records, None))
    monkeypatch.setattr("lachesis.operations.runs.get_run", lambda store, run_id: stalled)
    (row,) = answers(capsys, "runs")["runs"]
    status = get_status(store, RUN).to_payload()
    assert row["stalled"].startswith("stalled in sampler since 2026-11-25T04:00")
    assert status["progress"]["eta_seconds"] is None
    for view in (
        render_runs([row], 1, 1),
        run_status.render_status(observe_run(store, RUN)),
        run_status.render_results(view_run(store, RUN)),
        watch.render_panel(view_run(store, RUN)),
    ):
        shown = printed(view, 200)
        assert STALL in shown
        assert "\x1b[33mstalled" in shown or "\x1b[33mverdict: stalled" in shown
        assert "healthy" not in shown
    assert STALL in prefect_artifacts.render_run_verdict(view_run(store, RUN))
    page = write_report(store, RUN, tmp_path / "report").read_text()
    assert "mark good" not in page.partition("<main")[2]
    assert f"Stalled in sampler since 2026-11-25T04:00:00+00:00: {STALL}" in page


def test_a_step_that_is_far_too_late_has_no_time_left(store, stalled):
    """The monitor looks only every minute."""
    steps = MetricsFile(store.dir(RUN).metrics).read()
    unseen = stalled.model_copy(update={"health": None})
    for late_s, is_known in ((100, False), (1, True)):
        shift_s = time.time() - late_s - steps[-1]["time"]
        moved = [{**step, "time": step["time"] + shift_s} for step in steps]
        status = build_run_status(RunView(unseen, store.dir(RUN), moved))
        assert (status.progress.eta_seconds is not None) is is_known


def test_files_alone_do_not_end_a_stall(store, stalled):
    """Who looks without the monitor sees no more than files; a new step ends the stall."""
    old = stalled.model_copy(
        update={"health": {**(stalled.health or {}), "at": "2026-01-01T00:00:00+00:00"}}
    )
    assert refresh_health(store, old).stall == stalled.stall
    MetricsFile(store.dir(RUN).metrics).append(31, {"reward/mean": 0.5})
    assert refresh_health(store, old).stall is None


def test_watching_prints_when_a_stall_begins_and_ends(store, stalled, monkeypatch):
    console = Console(file=io.StringIO(), width=200)
    monkeypatch.setattr("lachesis.cli.terminal.console", console)
    display = watch._LineDisplay(stalled)
    moving = stalled.model_copy(update={"health": {**(stalled.health or {}), "stalled": None}})
    for record in (moving, stalled, stalled, moving, moving):
        display.draw(RunView(record, store.dir(RUN), MetricsFile(store.dir(RUN).metrics).read()))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    told = [line.partition(" s  ")[2] for line in lines if "stalled" in line]
    assert told == [
        localize_times(stalled.stall_text or ""),
        "no longer stalled in sampler, at step 30",
    ]


@pytest.mark.parametrize(
    ("num_steps", "text"),
    [(1, "one step each"), (3, "one step each"), (4, "means over 2 steps"), (300, "over 5 steps")],
)
def test_the_window_of_the_mean_rewards_is_the_one_that_was_used(store, num_steps, text):
    make(store, status="completed", ended_at=now_iso())
    for step in range(1, num_steps + 1):
        MetricsFile(store.dir(RUN).metrics).append(step, {"reward/mean": 0.5})
    view = view_run(RunStore(store.home), RUN)
    assert text in printed(run_status.render_results(view), 200)
