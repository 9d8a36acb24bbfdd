"""Disks that are full, or cannot be written."""

import os
import subprocess

import pytest

from lachesis.base.errors import StorageError
from tests.faults.struck_home import INTERVAL

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1200), pytest.mark.matrix]
needs_root = pytest.mark.skipif(
    os.geteuid() != 0, reason="only root may mount the small disk of this case"
)


@pytest.fixture
def disk(served):
    """The folder of the runs is a disk of 64 MB."""
    place = served.home / "runs"
    place.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(place)], check=True)
    yield place
    served.end_all_runs()
    subprocess.run(["umount", "--lazy", str(place)], check=True)


def fill(disk, *, leave=0):
    """A file that takes all but `leave` bytes."""
    file = disk / "filler"
    with file.open("wb", buffering=0) as stream:
        try:
            while True:
                stream.write(b"x" * 4096)
        except OSError:
            pass
        if leave:
            stream.truncate(max(0, stream.tell() - leave))
    return file


@needs_root
@pytest.mark.parametrize(
    ("what", "edits", "leave"),
    [("metrics", {"save_checkpoint_interval": 400}, 0), ("checkpoint", {}, 32768)],
)
def test_the_disk_fills_up_while_it_trains(served, disk, row, what, edits, leave):
    run = served.start(**edits)
    served.wait(lambda: len(run.steps()) > 2 * INTERVAL, 120, "some steps")
    before = run.kept()
    filler = fill(disk, leave=leave)
    ended_record = served.wait(
        lambda: (one := run.seen()).has_ended and one, 120, "the end of the run", 0.2
    )
    assert ended_record.status == "failed"
    run.gone()
    filler.unlink()
    record = run.seen()
    assert record.status == "failed"
    assert "No space left" in (record.error or ""), record.error
    assert run.kept() >= before
    run.resume()
    assert run.stop().status == "stopped"
    row(
        fault=f"disk full at {what}",
        phase="running",
        expected="failed",
        seen=f"failed: {record.error[:60]}; resumed",
        kept=run.kept(),
    )


@needs_root
def test_the_disk_is_full_when_the_record_is_written(served, disk, row):
    run = served.start()
    run.reach("starting")
    filler = fill(disk)
    ended_record = served.wait(
        lambda: (one := run.seen()).has_ended and one, 150, "the end of the run", 0.2
    )
    assert ended_record.status == "failed"
    run.gone()
    filler.unlink()
    record = run.seen()
    assert record.status == "failed"
    assert "No space left" in (record.error or ""), record.error
    run.resume()
    assert run.stop().status == "stopped"
    row(
        fault="disk full at record",
        phase="starting",
        expected="failed",
        seen="failed; resumed",
        kept=run.kept(),
    )


@needs_root
def test_a_home_that_cannot_be_written_is_told(served, disk, row):
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    with pytest.raises(StorageError, match="Read-only file system"):
        served.start()
    assert list(disk.iterdir()) == []
    subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
    run = served.start()
    run.reach("running")
    assert run.stop().status == "stopped"
    row(
        fault="read-only home",
        phase="before",
        expected="refused",
        seen="refused, nothing left; then trains",
        kept=run.kept(),
    )
