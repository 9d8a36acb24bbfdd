"""Which checkpoint is resumed."""

from __future__ import annotations

from pathlib import Path

import pytest

from lachesis.errors import CheckpointError, StorageError
from lachesis.trainer.checkpoints import Checkpoints, Manifest


def test_the_newest_complete_one_is_found(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.newest() is None
    for step in (25, 100, 50):
        checkpoints.write(
            Manifest(step=step, state=f"tinker://r/weights/{step}", sampler_weights="tinker://r/sampler_weights/x")
        )
    (tmp_path / ".step-000200.json.77").write_text("{")  # a write that was cut off
    newest = checkpoints.newest()
    assert newest is not None
    assert (newest.step, newest.state) == (100, "tinker://r/weights/100")


def test_a_damaged_manifest_is_named(tmp_path: Path) -> None:
    (tmp_path / "step-000025.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"step-000025\.json is no checkpoint manifest"):
        Checkpoints(tmp_path).newest()


def test_a_disk_that_refuses_is_told(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"step-000001\.json: No such file or directory; check the space and the rights"):
        Checkpoints(tmp_path / "gone").write(Manifest(step=1, state="s", sampler_weights="w"))
