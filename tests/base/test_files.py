"""Files and folders for their owner only, and there as a whole or not at all."""

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lachesis.base import files
from lachesis.base.errors import StorageError
from lachesis.base.files import create_folder_atomically
from lachesis.checkpoints import start_from_checkpoint
from lachesis.runs.store import RunStore
from tests.checkpoints.test_manifests import save
from tests.checkpoints.test_start_from_checkpoint import RUN
from tests.harness.home import write_run


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_forks_in_threads_leave_the_process_as_it_was(tmp_path):
    """The umask belongs to the whole process: who changes it for a moment changes it for every
    thread.
    """
    store = RunStore(tmp_path / "home")
    save(
        start_from_checkpoint.Checkpoints(
            store.dir(write_run(store, run_id=RUN).run_id).checkpoints
        ),
        4,
    )
    origin = start_from_checkpoint.find_source(store, RUN)
    before = os.umask(0o022)
    try:
        folders = [store.dir(f"{number:08x}") for number in range(40)]
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(origin.copy_into, folders))
        after = os.umask(0o022)
        beside = tmp_path / "beside"
        beside.touch()
    finally:
        os.umask(before)
    assert after == 0o022
    assert mode(beside) == 0o644
    planted = [path for folder in folders for path in (folder.path, *folder.path.rglob("*"))]
    assert {mode(path) for path in planted if path.is_dir()} == {0o700}
    assert {mode(path) for path in planted if path.is_file()} == {0o600}
    assert sum(path.is_file() for path in planted) > len(folders), (
        "each has files of the checkpoint and a manifest"
    )


def test_the_folders_above_are_private_too(tmp_path):
    before = os.umask(0o022)
    try:
        files.make_private_folder(tmp_path / "a" / "b")
        files.make_private_folder(tmp_path / "a" / "b")
    finally:
        os.umask(before)
    assert {mode(path) for path in (tmp_path / "a").rglob("*")} | {mode(tmp_path / "a")} == {0o700}


@pytest.mark.parametrize("exists", [False, True])
def test_a_folder_appears_when_it_is_whole(tmp_path, exists):
    target = tmp_path / "new" / "target"
    if exists:
        target.mkdir(parents=True)
    with create_folder_atomically(target) as place:
        (place / "sub").mkdir()
        (place / "sub" / "file").write_text("content")
        assert not (target / "sub").exists()
    assert (target / "sub" / "file").read_text() == "content"
    assert list(tmp_path.rglob(".*")) == []


@pytest.mark.parametrize("exists", [False, True])
def test_a_folder_that_fails_leaves_nothing(tmp_path, exists):
    target = tmp_path / "target"
    if exists:
        target.mkdir()

    def fill():
        with create_folder_atomically(target) as place:
            (place / "file").write_text("half")
            raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        fill()
    assert list(tmp_path.rglob("*")) == [target] * exists


def test_the_working_directory_can_be_filled(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with create_folder_atomically(Path(".")) as place:
        (place / "file").write_text("content")
    assert os.listdir(tmp_path) == ["file"]


def test_of_two_that_fill_one_folder_the_first_wins(tmp_path):
    target = tmp_path / "target"

    def fill_second():
        with create_folder_atomically(target) as late:
            (late / "file").write_text("second")
            with create_folder_atomically(target) as early:
                (early / "file").write_text("first")

    with pytest.raises(StorageError, match="target: "):
        fill_second()
    assert (target / "file").read_text() == "first"
    assert list(tmp_path.iterdir()) == [target]
