"""`prefect server start …` that collects garbage in a thread of its own.

A statement of SQLite that an error has left in a reference cycle is finalised by the collector, and that waits while another
thread works on the same connection. If the collector happens to run in the thread of the event loop while that connection waits
for the write lock, whoever has the lock cannot go on, and the whole server stands still for SQLite's 60 s. In its own thread
the collector may wait without harm.

Whoever can change a deployment can run programs here, so a page in a browser that came from elsewhere is refused, whatever name
it found this server by; $LACHESIS_SERVER_NAMES has further names, separated by commas.
"""

from __future__ import annotations

import gc
import os
import runpy
import sys
import threading
import time
from typing import Any

import uvicorn

from deployments.kept_log import keep_log
from lachesis.base.http_guard import HttpGuard

MOST_BYTES = 50_000_000
"""Of one request: an artifact, or a batch of log lines."""
EVERY_S = 1.0
WHOLE = 30
"""Each so many times the old objects are looked through as well."""
SETTLED = 15
"""By then all modules are loaded; their half a million objects stay, and need not be looked through again."""


def _collect() -> None:
    for count in range(1, sys.maxsize):
        time.sleep(EVERY_S)
        gc.collect(2 if count % WHOLE == 0 else 1)
        if count == SETTLED:
            gc.freeze()


def _guard_what_is_served() -> None:
    run = uvicorn.run

    def guarded(app: Any, *values: Any, host: str, **options: Any) -> None:
        names = [one.strip() for one in os.environ.get("LACHESIS_SERVER_NAMES", "").split(",") if one.strip()]
        around = HttpGuard(app, host=host, token=None, allowed_hosts=names, max_body_bytes=MOST_BYTES, serves_pages=True)
        run(around, *values, host=host, **options)

    uvicorn.run = guarded  # type: ignore[assignment]


if __name__ == "__main__":
    keep_log("server")
    _guard_what_is_served()
    gc.disable()
    threading.Thread(target=_collect, daemon=True, name="garbage").start()
    sys.argv[1:1] = ["server", "start"]
    runpy.run_module("prefect", run_name="__main__", alter_sys=True)
