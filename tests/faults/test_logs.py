"""A log without end, in a file of its own: it takes longer than anything else, and other cases go
on beside it.
"""

import time

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(3000), pytest.mark.matrix]


def test_a_log_without_end(served, row):
    """Ten gigabytes in one go."""
    run = served.start(mode="prints", gigabytes=10.0)
    run.reach("running")
    log = run.dir.get_log_file("environment")
    served.wait(lambda: log.with_name(f"{log.name}.1").exists(), 120, "the log to be put aside")
    served.wait(lambda: not _is_flooded(log), 600, "the end of the flood", 1)
    size = sum(file.stat().st_size for file in run.dir.logs.iterdir())
    assert size < 250_000_000
    run.advances()
    assert run.stop().status == "stopped"
    row(
        fault="log of 10 GB",
        phase="running",
        expected="trains on",
        seen=f"{size / 1e6:.0f} MB kept",
        kept=run.kept(),
    )


def _is_flooded(log):
    """Whether the log changes by a megabyte in a second; a few lines are written in any case."""

    def read_size():
        return log.stat().st_size if log.exists() else 0

    before = read_size()
    time.sleep(1)
    return abs(read_size() - before) > 1_000_000
