"""Who watches `lachesis serve` reads when a run starts and how it ends."""

import pytest

from deployments import run_lines
from deployments.run_lines import RunLines
from lachesis.runs.metrics import MetricsFile
from lachesis.runs.store import RunStore
from tests.harness.home import make_record

RUN = "0123abcd"


@pytest.fixture(autouse=True)
def look_at_once(monkeypatch):
    monkeypatch.setattr(run_lines, "LOOK_INTERVAL_S", 0.0)


def test_each_change_is_one_line(clean_environment, capsys):
    """And what was there before is none."""
    store = RunStore(clean_environment)
    store.create(make_record(run_id="ffff0000", status="completed"))
    lines = RunLines(clean_environment)
    store.create(make_record())
    store.update(RUN, status="starting")
    for status in ("running", "running", "completed"):
        store.update(RUN, status=status)
        MetricsFile(store.dir(RUN).metrics).append(1, {"reward/mean": 0.25})
        lines.print_changes()
    store.update("ffff0000", status="failed", error="the engine exited\nwith a long log")
    lines.print_changes()
    told = [line.split("  ", 1)[1] for line in capsys.readouterr().out.splitlines()]
    assert told == [
        f"run {RUN} (sums) trains: lachesis watch {RUN}",
        f"run {RUN} (sums) has completed: reward 0.250 → 0.250",
        "run ffff0000 (sums) has failed: the engine exited; `lachesis logs ffff0000`",
    ]


def test_a_run_that_is_stopped_and_one_that_cannot_be_read(clean_environment, capsys):
    store = RunStore(clean_environment)
    lines = RunLines(clean_environment)
    store.create(make_record())
    store.update(RUN, status="stopped", error="its budget is used up", name="mine")
    (store.root / "broken00").mkdir()
    (store.root / "broken00" / "run.json").write_text("{")
    lines.print_changes()
    lines.print_changes()
    (line,) = capsys.readouterr().out.splitlines()
    expected = f"run {RUN} (mine) was stopped: its budget is used up; `lachesis resume {RUN}`"
    assert expected in line


def test_a_line_that_cannot_be_written_ends_nothing(clean_environment, monkeypatch, capsys):
    """The launcher, which prints them, holds the server and the runner."""
    store = RunStore(clean_environment)
    lines = RunLines(clean_environment)

    def fail(*_, **__):
        raise OSError("no space left on device")

    with monkeypatch.context() as context:
        context.setattr("builtins.print", fail)
        store.create(make_record(status="running"))
        lines.print_changes()
    store.update(RUN, status="completed")
    lines.print_changes()
    assert f"run {RUN} (sums) has completed" in capsys.readouterr().out
