"""Read the clocks of this host together: the id of this boot, the monotonic clock, and the time of
day.

The monotonic clock starts again at each boot, so its value means nothing without the boot it
belongs to.
"""

import contextlib
import socket
import time
import uuid
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

MACHINE_ID_FILE = Path("/etc/machine-id")
BOOT_ID_FILE = Path("/proc/sys/kernel/random/boot_id")
# Hosts without a boot id identify a boot by its start time, which moves a little when the clock is
# corrected.
BOOT_TIME_TOLERANCE_S = 60.0
_BOOT_TIME_PREFIX = "since "


class ClockReading(NamedTuple):
    """Hold the readings of this host's clocks at one moment."""

    boot: str
    """The identity of the boot; compare two of them with `is_same_boot`."""
    monotonic_s: float
    now: datetime


def read_clocks() -> ClockReading:
    """Return the readings of this host's clocks."""
    return ClockReading(read_boot_id(), time.monotonic(), datetime.now(UTC))


def read_boot_id() -> str:
    """Return the identity of this boot: the kernel's id or the host's start time."""
    try:
        return BOOT_ID_FILE.read_text().strip()
    except OSError:  # This is not Linux.
        import psutil

        return f"{_BOOT_TIME_PREFIX}{psutil.boot_time():.0f}"


def read_host_id() -> str:
    """Return the identity of this host, which a restart does not change: that of its installation,
    or else the address of its network card, or its name.
    """
    with contextlib.suppress(OSError):
        if machine_id := MACHINE_ID_FILE.read_text().strip():
            return machine_id
    address = uuid.getnode()
    is_made_up = bool(address >> 40 & 1)
    return socket.gethostname() if is_made_up else f"{address:012x}"


def make_host_fields() -> dict[str, str]:
    """Return the fields of a record that say on which host an attempt is made."""
    return {"host_id": read_host_id(), "host_name": socket.gethostname()}


def is_same_boot(first: str, second: str) -> bool:
    """Return whether two results of `read_boot_id` belong to the same boot."""
    if first.startswith(_BOOT_TIME_PREFIX) and second.startswith(_BOOT_TIME_PREFIX):
        seconds = (float(text.removeprefix(_BOOT_TIME_PREFIX)) for text in (first, second))
        return abs(next(seconds) - next(seconds)) <= BOOT_TIME_TOLERANCE_S
    return first == second
