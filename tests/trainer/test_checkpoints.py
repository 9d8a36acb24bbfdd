"""Which checkpoint is resumed, and which are deleted."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from lachesis.errors import CheckpointError, StorageError
from lachesis.trainer.checkpoints import Checkpoints, Manifest


@pytest.fixture
def checkpoints(tmp_path: Path) -> Checkpoints:
    (tmp_path / "checkpoints").mkdir()
    return Checkpoints(tmp_path / "checkpoints")


def save(checkpoints: Checkpoints, step: int, **about: object) -> Path:
    """A checkpoint as the embedded engine and the trainer leave it; its adapter's file."""
    for kind in ("weights", "sampler_weights"):
        folder = checkpoints.folder.parent / "engine" / "r" / kind / str(step)
        folder.mkdir(parents=True)
        (folder / "adapter_model.safetensors").write_bytes(bytes([step]) * 100)
    paths = {"state": f"tinker://r/weights/{step}", "sampler_weights": f"tinker://r/sampler_weights/{step}"}
    checkpoints.write(Manifest.model_validate({"step": step, **paths, **about}))
    return folder / "adapter_model.safetensors"


def resumed(checkpoints: Checkpoints) -> int | None:
    found = checkpoints.to_resume()
    return None if found is None else found.step


def test_the_newest_whole_one_is_resumed(checkpoints: Checkpoints) -> None:
    assert checkpoints.newest() is None
    assert resumed(checkpoints) is None
    for step in (25, 100, 50):
        save(checkpoints, step)
    (checkpoints.folder / ".step-000200.json.77").write_text("{")  # a write that was cut off
    newest = checkpoints.newest()
    assert newest is not None
    assert (newest.step, newest.state) == (100, "tinker://r/weights/100")
    assert set(newest.files) == {f"engine/r/{kind}/100/adapter_model.safetensors" for kind in ("weights", "sampler_weights")}
    assert resumed(checkpoints) == 100


def test_damaged_ones_are_passed_over_with_a_warning(checkpoints: Checkpoints, caplog: pytest.LogCaptureFixture) -> None:
    """A byte that has changed, a file that is shorter or gone, a manifest that is cut off."""
    caplog.set_level(logging.WARNING)
    files = {step: save(checkpoints, step) for step in (25, 50, 75, 100)}
    files[100].write_bytes(b"x" + files[100].read_bytes()[1:])
    assert resumed(checkpoints) == 75
    assert "checkpoint of step 100 is damaged and passed over: engine/r/sampler_weights/100" in caplog.text
    files[75].write_bytes(b"")
    assert resumed(checkpoints) == 50
    assert "has 0 bytes instead of 100" in caplog.text
    (checkpoints.folder / "step-000050.json").write_text('{"step": 50')
    newest = checkpoints.newest()
    assert newest is not None
    assert newest.step == 100, "hashes are looked at by a resume only"
    assert resumed(checkpoints) == 25
    files[25].unlink()
    with pytest.raises(CheckpointError, match=r"none of the checkpoints in .* is whole .*step-000100\.json"):
        checkpoints.to_resume()


def test_what_is_damaged_does_not_supersede_what_comes_after_a_resume(checkpoints: Checkpoints) -> None:
    """Whose size is right would count as the newest one, and have each new one deleted."""
    save(checkpoints, 10)
    for step in (20, 30):
        save(checkpoints, step).write_bytes(b"x" * 100)
    assert resumed(checkpoints) == 10
    checkpoints.set_aside(after=10)
    save(checkpoints, 12)
    assert [one.step for one in checkpoints.superseded(keep=1)] == [10]
    assert resumed(checkpoints) == 12
    assert len(list(checkpoints.folder.glob("*.damaged"))) == 2


def test_a_checkpoint_of_another_server_has_no_files_here(checkpoints: Checkpoints) -> None:
    checkpoints.write(Manifest(step=1, state="tinker://cloud/weights/a", sampler_weights="tinker://cloud/sampler_weights/a"))
    assert resumed(checkpoints) == 1


def test_the_last_ones_the_best_and_the_final_one_are_kept(checkpoints: Checkpoints) -> None:
    for step, reward in ((1, 0.1), (2, 0.9), (3, 0.2), (4, 0.3)):
        save(checkpoints, step, reward=reward)
    assert [one.step for one in checkpoints.superseded(2)] == [1]
    assert [one.step for one in checkpoints.superseded(1)] == [1, 3]
    save(checkpoints, 5, reward=0.1, final=True)
    save(checkpoints, 6, reward=0.1)
    assert [one.step for one in checkpoints.superseded(1)] == [1, 3, 4]
    only = Checkpoints(checkpoints.folder.parent / "other" / "checkpoints")
    only.folder.mkdir(parents=True)
    save(only, 1)
    assert only.superseded(0) == [], "never the only one"


def test_a_disk_that_refuses_is_told(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"step-000001\.json: No such file or directory; check the space and the rights"):
        Checkpoints(tmp_path / "gone").write(Manifest(step=1, state="s", sampler_weights="w"))
