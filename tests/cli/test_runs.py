"""Runs as a person sees them: the list, a comparison, what is written on them, and removing."""

import re

import pytest

from lachesis.cli import terminal
from lachesis.cli.commands import run_status, watch
from lachesis.cli.main import main
from lachesis.operations.runs import ObservedRun
from lachesis.reporting.run_view import RunView
from lachesis.runs.metrics import MetricsFile
from lachesis.runs.record import ServiceRecord
from lachesis.runs.store import RunStore
from tests.harness.home import make_record, write_run

SLOW, FAST, OTHER = "aaaa0001", "bbbb0002", "cccc0003"


def make_run(store, run_id, learning_rate, rewards, **changes):
    """Write a run that has ended, with a learning rate and a seed of its own."""
    edits = {"tinker": {"learning_rate": learning_rate, "seed": changes.get("seed", 0)}}
    values = {"status": "completed", "total_steps": len(rewards) or 5}
    write_run(store, rewards, run_id=run_id, edits=edits, **{**values, **changes})


def add_held_out(store, run_id, share, items):
    metrics = {"eval/step": 4, "eval/percent_correct": share, "eval/items": items}
    MetricsFile(store.dir(run_id).metrics).add_evaluation(metrics)


@pytest.fixture
def store(clean_environment):
    """Two runs on `sums` that differ in the learning rate, and a running one on `words`."""
    store = RunStore(clean_environment)
    make_run(store, SLOW, 1e-4, [0.1, 0.1, 0.2, 0.2], created_at="2026-01-01T00:00:00+00:00")
    make_run(
        store, FAST, 1e-3, [0.1, 0.3, 0.8, 0.9], created_at="2026-01-02T00:00:00+00:00", seed=7
    )
    make_run(store, OTHER, 1e-3, [], environment="words", created_at="2026-01-03T00:00:00+00:00")
    store.update(OTHER, status="failed")
    return store


def test_the_list_has_progress_rewards_and_what_differs(store, answer, capsys):
    rows = {row["run_id"]: row for row in answer("runs", "--env", "sums")["runs"]}
    assert rows[FAST]["reward"] == {"first": 0.2, "last": 0.85}
    assert (rows[FAST]["step"], rows[FAST]["total_steps"]) == (4, 4)
    assert rows[SLOW]["differing"] == {"learning_rate": 0.0001, "seed": 0}
    assert main(["runs"]) == 0
    shown = capsys.readouterr().out
    assert "learning_rate=0.0001 seed=0" in shown
    assert "0.200 → 0.850" in shown


@pytest.mark.parametrize(
    ("words", "run_ids"),
    [
        ([], [OTHER, FAST, SLOW]),
        (["--env", "sums"], [FAST, SLOW]),
        (["--status", "failed"], [OTHER]),
        (["--tag", "sweep"], [SLOW]),
        (["--sort", "reward"], [FAST, SLOW, OTHER]),
        (["--sort", "held-out"], [SLOW, OTHER, FAST]),
        (["--limit", "1"], [OTHER]),
        (["--tag", "none"], []),
    ],
)
def test_the_list_is_filtered_and_sorted(store, answer, words, run_ids):
    answer("edit", SLOW, "--tag", "sweep")
    add_held_out(store, SLOW, 0.5, 20)
    found = answer("runs", *words)
    assert [row["run_id"] for row in found["runs"]] == run_ids
    assert found["total"] == 3


def test_an_unknown_status_is_refused(store, answer):
    assert "allowed: pending, starting" in answer("runs", "--status", "done", code=1)["error"]


@pytest.mark.parametrize(
    ("shares", "verdict"),
    [
        ((0.2, 0.9), f"{FAST} is best: 0.900 held out, above all others."),
        ((0.5, 0.6), f"{SLOW} and {FAST} are best, and 40 items cannot tell them apart"),
        ((0.5, None), "1 of 2 runs has a held-out result of trained weights"),
    ],
)
def test_the_best_run_is_named_only_if_the_items_can_tell(store, answer, shares, verdict):
    for run_id, share in zip((SLOW, FAST), shares, strict=True):
        if share is not None:
            add_held_out(store, run_id, share, 40)
    found = answer("compare", "aa", "bb")
    assert verdict in found["verdict"]
    assert found["differing"]["tinker.learning_rate"] == {SLOW: 0.0001, FAST: 0.001}


def test_a_run_with_a_name_is_compared_by_it(store, answer, capsys):
    answer("edit", SLOW, "--name", "slow one")
    for run_id, share in ((SLOW, 0.5), (FAST, 0.6)):
        add_held_out(store, run_id, share, 40)
    assert f"slow one ({SLOW}) and {FAST} are best" in answer("compare", "aa", "bb")["verdict"]
    capsys.readouterr()
    assert main(["compare", "aa", "bb"]) == 0
    header = capsys.readouterr().out.splitlines()[0]
    assert header.split() == ["run", "slow", "one", f"({SLOW})", FAST]


def test_runs_on_different_environments_are_not_ranked(store, answer):
    assert "cannot be compared" in answer("compare", SLOW, OTHER)["verdict"]
    assert "name two or more" in answer("compare", SLOW, code=1)["error"]


def test_a_comparison_is_a_page_with_curves(store, tmp_path, capsys):
    store.update(SLOW, note="<b>slow</b>")
    assert main(["compare", SLOW, FAST]) == 0
    shown = capsys.readouterr().out
    assert "▁" in shown
    assert "learning_rate" in shown
    folder = tmp_path / "pages"
    assert main(["report", SLOW, FAST, "--to", str(folder)]) == 0
    content = (folder / "comparison.html").read_text()
    assert "&lt;b&gt;slow&lt;/b&gt;" in content
    assert "0.0001" in content
    assert '"raw":[0.1,0.1,0.2,0.2]' in content
    assert not re.findall(r'(?:src|href)="(?!#)', content), "it needs no other file"


def test_what_a_person_writes_on_a_run(store, answer):
    answer("edit", SLOW, "--name", "first try", "--note", "too slow", "--tag", "b", "--tag", "a")
    record = store.load(SLOW)
    assert (record.name, record.note, record.tags) == ("first try", "too slow", ["a", "b"])
    changed = answer("edit", SLOW, "--name", "", "--untag", "a")
    assert changed == {"run_id": SLOW, "name": None, "note": "too slow", "tags": ["b"]}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "nothing to change"),
        (["--name", "x" * 61], "at most 60 characters"),
        (["--tag", "two words"], "the tag 'two words' cannot be used; allowed:"),
        (["--note", "\x1b[31mred"], "cannot be used; allowed:"),
    ],
)
def test_what_cannot_be_written_is_refused(store, answer, words, message):
    before = store.load(SLOW)
    assert message in answer("edit", SLOW, *words, code=1)["error"]
    assert store.load(SLOW) == before


def test_ended_runs_are_removed(store, answer):
    """And nothing is, if one of them is alive."""
    with store.dir(FAST).hold_alive_lock():
        assert "still being ended" in answer("rm", SLOW, FAST, "--yes", code=1)["error"]
    assert store.dir(SLOW).path.is_dir()
    assert "is not a terminal" in answer("rm", SLOW, code=1)["error"]
    assert answer("rm", SLOW, FAST, "-y")["removed"] == [SLOW, FAST]
    assert not store.dir(SLOW).path.exists()
    assert [record.run_id for record in store.all()] == [OTHER]


def test_a_removal_asks(store, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    for reply, code in (("n", 1), ("", 1), ("y", 0)):
        monkeypatch.setattr("builtins.input", lambda question, reply=reply: reply)
        assert main(["rm", SLOW]) == code
    assert not store.dir(SLOW).path.exists()


def test_runs_that_have_ended_are_shown_once(store, capsys):
    assert main(["watch", SLOW, FAST]) == 0
    shown = capsys.readouterr().out
    assert f"{SLOW}  " in shown
    assert f"run {FAST} is completed" in shown
    assert main(["watch"]) == 1
    assert "no run is under way" in capsys.readouterr().err


def test_ctrl_c_says_that_the_run_goes_on(capsys):
    with pytest.raises(KeyboardInterrupt), watch.explain_interrupt([SLOW, FAST]):
        raise KeyboardInterrupt
    shown = capsys.readouterr().err
    assert f"runs {SLOW} {FAST} go on" in shown
    assert f"lachesis watch {SLOW} {FAST}" in shown
    assert f"lachesis stop {FAST}" in shown


def test_processes_that_an_ended_run_has_ended_are_not_failures(store, capsys):
    states = {"engine": "exited (-15)", "trainer": "exited (0)", "environment": "running"}
    services = {name: ServiceRecord(log="x", state=state) for name, state in states.items()}
    for status, words in (
        ("completed", ["trainer ended", "engine ended", "env running"]),
        ("failed", ["trainer exited (0)", "engine exited (-15)", "env running"]),
    ):
        record = make_record(status=status, services=services)
        observed = ObservedRun(RunView(record, store.dir(FAST), []), None, None, None)
        terminal.console.print(run_status.render_status(observed))
        shown = capsys.readouterr().out
        assert all(word in shown for word in words)
