"""The log of the runner, and of the server.

Both outlive a launcher that is killed, and go on writing, so each looks after its own log instead of having it looked after.
"""

from __future__ import annotations

import atexit
import os
import sys

from lachesis.base import paths
from lachesis.base.secrets import find_secret_values
from lachesis.supervision.reaper import LOG_DRAIN_TIMEOUT_S, LogCopier

MOST_BYTES = 100_000_000
"""Of a log and the part before it. Months of a busy home write less; a server that is in trouble may write without end."""


def keep_log(name: str, most_bytes: int = MOST_BYTES) -> None:
    """From now on what this process and its children write to stdout and stderr goes into `{home}/logs/{name}.log`, without the
    values of this process's secrets, and with what was before in `{name}.log.1`. What cannot run Python any more, as after a
    crash of the interpreter, is lost."""
    reading, writing = os.pipe()
    log = LogCopier(reading, str(paths.home() / "logs" / f"{name}.log"), find_secret_values(os.environ), most_bytes)
    before = {number: os.dup(number) for number in (1, 2)}
    for number in before:
        os.dup2(writing, number)
    os.close(writing)
    log.start()

    def finish() -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, own in before.items():
            os.dup2(own, number)
        log.join(LOG_DRAIN_TIMEOUT_S)

    atexit.register(finish)
