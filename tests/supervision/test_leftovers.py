"""What dead runs have left is found and ended; what lives, or is somebody else's, stays."""

import json
import os
import subprocess
import sys
import tempfile

import psutil
import pytest
import tinker

from lachesis.base.timestamps import now_iso
from lachesis.cli.commands import doctor
from lachesis.runs.store import RunStore
from lachesis.supervision import leftovers
from lachesis.supervision.process_marks import MARK_VARIABLE, build_mark
from tests.harness.home import write_run

RUN = "0123abcd"


@pytest.fixture
def store(clean_environment):
    """With one run that has failed."""
    store = RunStore(clean_environment)
    write_run(store, run_id=RUN, status="failed", ended_at=now_iso())
    return store


@pytest.fixture
def sleepers():
    """A factory of processes with a mark; what is left of them is ended."""
    made = []

    def start(value):
        command = [
            sys.executable,
            "-c",
            "import socket, time; s = socket.create_server(('127.0.0.1', 0)); time.sleep(600)",
        ]
        made.append(subprocess.Popen(command, env={**os.environ, MARK_VARIABLE: value}))
        return made[-1]

    yield start
    for one in made:
        one.kill()
        one.wait()


def old(place, age_s=3600):
    os.utime(place, (place.stat().st_mtime - age_s,) * 2)
    return place


def test_processes_of_a_dead_run_are_ended_and_nobody_elses(store, sleepers):
    folder = store.dir(RUN)
    stray, guessed = sleepers(build_mark(folder.path)), sleepers(f"{folder.path}:guessed")
    with folder.hold_alive_lock():
        assert leftovers.find_all_leftovers(store) == [], "the run lives"
    (found,) = leftovers.find_all_leftovers(store)
    assert f"process {stray.pid}" in found.description
    assert f"of run {RUN}, which has ended" in found.description
    assert found.clean_up().startswith(f"ended {stray.pid} ")
    stray.wait(5)
    assert guessed.poll() is None
    assert leftovers.find_all_leftovers(store) == []


def test_a_process_tells_where_it_listens(store, sleepers):
    stray = psutil.Process(sleepers(build_mark(store.dir(RUN).path)).pid)
    while not stray.net_connections("inet"):
        pass
    assert (
        f"listens on :{stray.net_connections('inet')[0].laddr.port}"
        in leftovers.find_all_leftovers(store)[0].description
    )


def test_files_that_were_being_written_are_removed_once_they_are_old(store):
    folder = store.dir(RUN).path
    model = store.home / "models" / f".{'0' * 32}"
    model.mkdir(parents=True)
    (model / "x").touch()
    young, record = folder / ".run.json.123.abcdef", folder / ".run.json.99.012345"
    theirs = folder / "buffer.part", folder / ".replay.12", store.home / "models" / "mine.part"
    for place in (young, record, *theirs):
        place.touch()
    for place in (record, model, *theirs):
        old(place)
    found = leftovers.find_all_leftovers(store)
    assert {one.description.split(":")[0] for one in found} == {str(record), str(model)}
    assert all(one.clean_up().startswith("removed ") for one in found)
    assert all(place.exists() for place in (young, *theirs))
    assert store.load(RUN).status == "failed"
    assert not model.exists()


def test_folders_of_old_checks_are_removed_unless_a_process_uses_them(
    tmp_path, monkeypatch, sleepers
):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    names = ("lachesis-check-old", "lachesis-check-young", "lachesis-check-used", "theirs")
    stale, young, used, theirs = (tmp_path / name for name in names)
    for place in (stale, young, used, theirs):
        place.mkdir()
        (place / "check.log").touch()
    sleeper = sleepers(build_mark(used))
    for place in (stale, used, theirs):
        old(place, 2 * leftovers.MAX_CHECK_AGE_S)
    assert leftovers.remove_old_checks() == [str(stale)]
    assert [place.exists() for place in (stale, young, used, theirs)] == [False, True, True, True]
    sleeper.kill()
    sleeper.wait()
    assert leftovers.remove_old_checks() == [str(used)]


def test_a_save_that_was_cut_off_is_removed_and_no_checkpoint_is(store):
    folder = store.dir(RUN)
    names = ["step-000004-state", "step-000008-1a2b3c-state"]
    for name in names:
        place = folder.engine / "s:train:0" / "weights" / name
        place.mkdir(parents=True)
        (place / "checkpoint.json").write_text("{}")
    manifest = {
        "step": 4,
        "state": "tinker://s:train:0/weights/step-000004-state",
        "sampler_weights": "tinker://x/y/z",
    }
    (folder.checkpoints / "step-000004.json").write_text(json.dumps(manifest))
    (folder.checkpoints / "step-000006.json").write_text("{")
    assert leftovers.find_all_leftovers(store) == [], "it may name the other one"
    (folder.checkpoints / "step-000006.json").unlink()
    (found,) = leftovers.find_all_leftovers(store)
    assert names[1] in found.description
    found.clean_up()
    assert [one.name for one in (folder.engine / "s:train:0" / "weights").iterdir()] == names[:1]


def test_a_session_whose_trainer_was_killed_is_ended(store, engine, monkeypatch):
    client = tinker.ServiceClient(base_url=engine.url, api_key=engine.token)
    client.create_lora_training_client(base_model=engine.model, rank=4).result()
    session = client.holder.get_session_id()
    store.dir(RUN).tinker_session.write_text(json.dumps({"id": session, "url": engine.url}))
    (found,) = leftovers.find_all_leftovers(store)
    assert found.description == f"Tinker session {session} of run {RUN} at {engine.url}"
    monkeypatch.delenv("TINKER_API_KEY", raising=False)
    assert "set TINKER_API_KEY" in found.clean_up()
    monkeypatch.setenv("TINKER_API_KEY", engine.token)
    assert found.clean_up() == f"ended session {session} at {engine.url}"
    assert leftovers.find_all_leftovers(store) == []
    client.close("success").result()


def test_doctor_lists_it(store, sleepers):
    sleepers(build_mark(store.dir(RUN).path))
    last = doctor.run_checks()[-1]
    assert (last.name, last.ok, last.needed) == ("left behind", False, True)
    assert last.remedy == "lachesis doctor --fix"
