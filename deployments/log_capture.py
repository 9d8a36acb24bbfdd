"""Write the log of the runner and of the server.

Both survive a launcher that is killed and continue to write, so each manages its own log.
"""

import atexit
import os
import sys

from lachesis.base import paths
from lachesis.base.secrets import find_secret_values
from lachesis.supervision.reaper import LOG_DRAIN_TIMEOUT_S, LogCopier

# Maximum size of a log and its predecessor; months of normal use stay below it.
MAX_OUTPUT_LOG_BYTES = 100_000_000


def capture_output(name: str, max_bytes: int = MAX_OUTPUT_LOG_BYTES) -> None:
    """Redirect stdout and stderr of this process and its children to `{home}/logs/{name}.log`.

    Secrets of this process are removed, and earlier output is moved to `{name}.log.1`. What is
    written after the interpreter has crashed is lost.
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
