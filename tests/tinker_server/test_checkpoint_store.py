"""Checkpoints on disk, with a process that dies at each step of replacing one."""

import json
import subprocess
import sys
import time
from datetime import datetime

import pytest
import torch
from fastapi.testclient import TestClient

from lachesis.base.errors import EngineRequestError
from lachesis.engine.base_model.adapter_files import WeightsStore
from lachesis.engine.embedded_engine import Engine
from lachesis.tinker_server import listing_routes
from lachesis.tinker_server.checkpoint_store import CheckpointPath
from lachesis.tinker_server.routes import create_app

PATH = CheckpointPath("run", "weights", "name")
CHANGES = 24
"""More changes of the file system than overwriting a checkpoint makes."""
OVERWRITE = """
import os, sys
from pathlib import Path
import torch
from lachesis.tinker_server.checkpoint_store import CheckpointPath
from lachesis.engine.base_model.adapter_files import WeightsStore

def overwrite(store, left):
    def die(event, arguments):
        nonlocal left
        if event in ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "shutil.rmtree"):
            left -= 1
            if left == 0:
                os._exit(9)

    path = CheckpointPath("run", "weights", "name")
    sys.addaudithook(die)
    store.save(
        path,
        tensors={"x": torch.ones(2)},
        adapter_config={},
        checkpoint_record={"which": "new"},
        overwrite=True,
    )
    os._exit(0)

for count, folder in enumerate(sys.argv[1:], start=1):
    child = os.fork()
    if child == 0:
        overwrite(WeightsStore(Path(folder)), count)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def save(store, which, name="name", *, overwrite=False):
    value = torch.zeros(2) if which == "old" else torch.ones(2)
    path = CheckpointPath("run", "weights", name)
    store.save(
        path,
        tensors={"x": value},
        adapter_config={},
        checkpoint_record={"which": which},
        overwrite=overwrite,
    )


def test_an_interrupted_overwriting_leaves_the_old_checkpoint_or_the_new_one(tmp_path):
    """The process dies before each single change that it makes to the file system."""
    stores = [WeightsStore(tmp_path / str(count)) for count in range(CHANGES)]
    for store in stores:
        save(store, "old")
    command = [sys.executable, "-c", OVERWRITE, *(str(store.root) for store in stores)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    exits = [int(line) for line in done.stdout.split()]
    assert exits == sorted(exits, reverse=True)
    assert {0, 9} == set(exits)
    outcomes = []
    for store in stores:
        tensors, _, about = store.load(PATH)
        assert tensors["x"].sum() == (0 if about["which"] == "old" else 2)
        assert store.list_checkpoints() == [str(PATH)]
        outcomes.append(about["which"])
        with pytest.raises(EngineRequestError, match="already exists"):
            save(store, "old")
        save(store, "old", overwrite=True)
        assert store.read_record(PATH)["which"] == "old"
        store.delete(PATH)
        assert store.list_checkpoints() == []
    assert outcomes == sorted(outcomes, reverse=True), "the old one came back after the new one"
    assert set(outcomes) == {"old", "new"}


def test_a_damaged_record_is_left_out_of_listings_and_named_when_asked_for(tmp_path):
    store = WeightsStore(tmp_path)
    save(store, "old")
    save(store, "old", name="damaged")
    (tmp_path / "run" / "weights" / "damaged" / "checkpoint.json").write_text("{")
    store.save_run("run", {"training_run_id": "run", "last_request_time": "2026"})
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "run.json").write_bytes(b"\xff")
    assert store.list_checkpoints() == [str(PATH)]
    assert [run["training_run_id"] for run in store.list_runs()] == ["run"]
    with pytest.raises(Exception, match=r"checkpoint\.json cannot be read"):
        store.read_record(CheckpointPath("run", "weights", "damaged"))


def test_a_name_that_listings_would_hide_is_refused(tmp_path):
    store = WeightsStore(tmp_path)
    with pytest.raises(EngineRequestError, match="does not begin with"):
        save(store, "old", name=".hidden")
    assert json.dumps(store.list_checkpoints()) == "[]"


def _save(store):
    store.save(
        PATH, tensors={"x": torch.ones(2)}, adapter_config={}, checkpoint_record={"time": "t"}
    )


def test_a_time_to_live_of_zero_ends_at_once_and_none_never(tmp_path):
    store = WeightsStore(tmp_path)
    _save(store)
    store.set_ttl(PATH, None)
    assert store.list_checkpoints("run") == [str(PATH)]
    store.set_ttl(PATH, 0)
    assert store.list_checkpoints("run") == []


@pytest.mark.parametrize("seconds", [-1, 2**70])
def test_an_impossible_time_to_live_is_refused(tmp_path, seconds):
    store = WeightsStore(tmp_path)
    _save(store)
    with pytest.raises(EngineRequestError, match=f"ttl_seconds is {seconds}; allowed: 0 to"):
        store.set_ttl(PATH, seconds)


def test_a_download_address_works_until_it_expires(random_model, tmp_path, monkeypatch):
    engine = Engine(random_model, tmp_path)
    _save(engine.store)
    with TestClient(create_app(engine, "tml-x"), headers={"X-API-Key": "tml-x"}) as client:
        address = "/api/v1/training_runs/run/checkpoints/weights/name/external_weights_urls"
        answer = client.get(address).json()
        url = answer["urls"]["checkpoint.json"]
        expires = datetime.fromisoformat(answer["expires"]).timestamp()
        assert 3590 < expires - time.time() < 3610
        assert client.get(url).status_code == 200
        later = url.replace(str(int(expires)), str(int(expires) + 60))
        assert "has not signed" in client.get(later).json()["detail"]
        monkeypatch.setattr(listing_routes.time, "time", lambda: expires + 1)
        refused = client.get(url)
        assert (refused.status_code, refused.json()["detail"]) == (
            403,
            "the URL has expired; request a new one",
        )
