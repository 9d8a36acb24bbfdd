"""The identity of a boot."""

import time
from datetime import UTC, datetime

import psutil

from lachesis.runs import host_clock


def test_a_boot_keeps_its_identity():
    assert host_clock.is_same_boot(host_clock.read_boot_id(), host_clock.read_boot_id())
    assert not host_clock.is_same_boot(host_clock.read_boot_id(), "another")
    reading = host_clock.read_clocks()
    assert abs(reading.monotonic_s - time.monotonic()) < 5
    assert abs((datetime.now(UTC) - reading.now).total_seconds()) < 5


def test_without_an_id_the_time_of_the_boot_tells_it(monkeypatch, tmp_path):
    """It moves a little when the time is corrected."""
    with_id = host_clock.read_boot_id()
    monkeypatch.setattr(host_clock, "BOOT_ID_FILE", tmp_path / "none")
    began = []
    for moved_s in (0, 30, 3600):
        monkeypatch.setattr(psutil, "boot_time", lambda moved_s=moved_s: 1.8e9 + moved_s)
        began.append(host_clock.read_boot_id())
    assert host_clock.is_same_boot(began[0], began[1])
    assert not host_clock.is_same_boot(began[0], began[2])
    assert not host_clock.is_same_boot(began[0], with_id)
