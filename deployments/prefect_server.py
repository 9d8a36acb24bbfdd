"""Run `prefect server start …` with a separate thread for garbage collection, and with a guard.

If an error has left an SQLite statement in a reference cycle, the garbage collector finalises it,
and waits while another thread uses the same connection. If the collector runs in the event loop's
thread while that connection waits for the write lock, the holder of the lock cannot continue, and
the whole server stops for SQLite's 60 s. In its own thread the collector may wait without harm.

Whoever can change a deployment can run programs here, so requests of other web pages are refused,
whatever name they reach this server by; $LACHESIS_SERVER_NAMES has further names, separated by
commas.
"""

from __future__ import annotations

import gc
import os
import runpy
import sys
import threading
import time

from deployments.log_capture import capture_output
from lachesis.base.http_guard import ASGIApp, HttpGuard
from lachesis.base.http_server import wrap_served_apps
from lachesis.prefect_client.internals import explain_refusals, lock_sqlite_at_begin

# Maximum size of a request: an artifact, or a batch of log lines.
MAX_REQUEST_BYTES = 50_000_000
COLLECT_INTERVAL_S = 1.0
# Every so many collections old objects are examined as well.
FULL_COLLECTION_EVERY = 30
# After this many collections all modules are loaded, and their half a million objects are frozen.
FREEZE_AFTER = 15


def _collect_garbage() -> None:
    for count in range(1, sys.maxsize):
        time.sleep(COLLECT_INTERVAL_S)
        gc.collect(2 if count % FULL_COLLECTION_EVERY == 0 else 1)
        if count == FREEZE_AFTER:
            gc.freeze()


def _guard_app(app: ASGIApp, host: str) -> HttpGuard:
    names = os.environ.get("LACHESIS_SERVER_NAMES", "").split(",")
    return HttpGuard(
        app,
        host=host,
        token=None,
        allowed_hosts=[name.strip() for name in names if name.strip()],
        max_body_bytes=MAX_REQUEST_BYTES,
        serves_pages=True,
    )


if __name__ == "__main__":
    capture_output("server")
    wrap_served_apps(_guard_app)
    lock_sqlite_at_begin()
    explain_refusals()
    gc.disable()
    threading.Thread(target=_collect_garbage, daemon=True, name="garbage").start()
    sys.argv[1:1] = ["server", "start"]
    runpy.run_module("prefect", run_name="__main__", alter_sys=True)
