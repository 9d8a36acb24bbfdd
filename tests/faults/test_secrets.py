"""Where secrets are, and who may read the files of a run."""

import shutil

import httpx
import psutil
import pytest

from lachesis.runs.record import RunRecord

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1200), pytest.mark.matrix]


def test_no_secret_is_anywhere(served, row):
    """Of the user's keys, which the launcher has, and of the tokens of the run: not in an argument,
    not in the environment of a child that has no use for them, not in a file of the home, which
    holds logs, database and artifacts.
    """
    run = served.start(use_wandb=True)
    run.reach("running")
    tokens = {name: found for name in ("engine", "trainer") if (found := _token(run.pid(name)))}
    assert set(tokens) == {"engine", "trainer"}
    marked = served.KEY
    holders = {}
    for pid, command in served.processes().items():
        assert marked not in command
        assert not any(token in command for token in tokens.values()), command
        environ = psutil.Process(pid).environ()
        holders[pid] = {name for name, value in environ.items() if marked in value}
    parts = {name: run.pid(name) for name in ("engine", "api", "trainer", "environment", "flow")}
    parts |= {
        "server": served.part("server"),
        "runner": served.part("runner"),
        "reaper": run.pid("reaper"),
    }
    for name in ("engine", "api", "environment", "server", "reaper"):
        assert holders[parts[name]] == set(), (name, holders[parts[name]])
    assert holders[parts["trainer"]] == {"WANDB_API_KEY"}
    assert run.stop().status == "stopped"
    run_report = run.seen()
    assert isinstance(run_report, RunRecord)
    found = [
        str(file)
        for file in served.home.rglob("*")
        if file.is_file() and _holds(file, [marked, *tokens.values()])
    ]
    assert found == []
    row(
        fault="scan for secrets",
        phase="running, ended",
        expected="none",
        seen="none",
        kept=run.kept(),
    )


def test_a_server_with_a_password(served, row, monkeypatch):
    """Nobody writes without it, runs train, and it is known to server, runner and flow alone."""
    password = "pw-marked-77c1e0"
    served.stop_serving()
    monkeypatch.setenv("PREFECT_SERVER_API_AUTH_STRING", f"me:{password}")
    served.serve()
    try:
        run = served.start()
        run.reach("running")
        url = f"http://127.0.0.1:{served.port}/api/flow_runs/filter"
        answers = [
            httpx.post(url, json={}, auth=auth, trust_env=False).status_code
            for auth in (None, ("me", "x"), ("me", password))
        ]
        assert answers == [401, 401, 200]
        for name in ("engine", "api", "trainer", "environment", "reaper"):
            assert not any(
                password in value for value in psutil.Process(run.pid(name)).environ().values()
            ), name
        assert run.stop().status == "stopped"
        found = [
            str(file)
            for file in served.home.rglob("*")
            if file.is_file() and _holds(file, [password])
        ]
        assert found == []
    finally:
        served.end_all_runs()
        served.stop_serving()
    row(
        fault="server with a password",
        phase="running",
        expected="401 without it",
        seen="401, trains on",
        kept=run.kept(),
    )


def _token(pid):
    environ = psutil.Process(pid).environ()
    return environ.get("LACHESIS_ENGINE_TOKEN") or environ.get("LACHESIS_INFERENCE_TOKEN")


def _holds(file, texts):
    try:
        content = file.read_bytes()
    except OSError:
        return False
    return any(text.encode() in content for text in texts)


def test_files_are_for_their_owner_alone(served, row):
    run = served.take("running")
    run.reach("running")
    assert run.stop().status == "stopped"
    places = [run.dir.path, *run.dir.path.rglob("*")]
    assert [str(place) for place in places if place.lstat().st_mode & 0o077] == []
    shutil.rmtree(run.dir.path)
    row(fault="modes of files", phase="ended", expected="0600, 0700", seen="all", kept="")
