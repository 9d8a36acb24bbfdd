"""The log of the runner, and of the server.

Both outlive a launcher that is killed, and go on writing, so each looks after its own log instead
of having it looked after.
"""

from __future__ import annotations

import atexit
import os
import sys

from lachesis.base import paths
from lachesis.base.secrets import find_secret_values
from lachesis.supervision.reaper import LOG_DRAIN_TIMEOUT_S, LogCopier

MAX_OUTPUT_LOG_BYTES = 100_000_000
"""Of a log and the part before it. Months of a busy home write less; a server that is in trouble
may write without end.
"""


def capture_output(name: str, max_bytes: int = MAX_OUTPUT_LOG_BYTES) -> None:
    """From now on what this process and its children write to stdout and stderr goes into
    `{home}/logs/{name}.log`, without the values of this process's secrets, and with what was before
    in `{name}.log.1`. What cannot run Python any more, as after a crash of the interpreter, is
    lost.
    """
    read_fd, write_fd = os.pipe()
    log = LogCopier(
        read_fd,
        str(paths.home() / "logs" / f"{name}.log"),
        find_secret_values(os.environ),
        max_bytes,
    )
    saved_fds = {fd: os.dup(fd) for fd in (1, 2)}
    for fd in saved_fds:
        os.dup2(write_fd, fd)
    os.close(write_fd)
    log.start()

    def finish() -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        for fd, saved_fd in saved_fds.items():
            os.dup2(saved_fd, fd)
        log.join(LOG_DRAIN_TIMEOUT_S)

    atexit.register(finish)
