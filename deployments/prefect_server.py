"""Run `prefect server start …` with a separate thread for garbage collection, and with a guard.

If an error has left an SQLite statement in a reference cycle, the garbage collector finalises it,
and waits while another thread uses the same connection. If the collector runs in the event loop's
thread while that connection waits for the write lock, the holder of the lock cannot continue, and
the whole server stops for SQLite's 60 s. In its own thread the collector may wait without harm.

Whoever can change a deployment can run programs here, so requests of other web pages are refused,
whatever name they reach this server by; $LACHESIS_SERVER_NAMES has further names, separated by
commas.
"""

import gc
import os
import runpy
import sys
import threading
import time

from starlette.types import Receive, Send

from deployments.log_capture import capture_output
from lachesis.base.http_guard import ASGIApp, HttpGuard, Scope
from lachesis.base.http_server import wrap_served_apps
from lachesis.prefect_client.internals import explain_refusals, lock_sqlite_at_begin
from lachesis.prefect_client.serve_info import HOME_HEADER, make_home_proof
from lachesis.supervision.leftovers import LAUNCHER_MARK_VARIABLE

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


def _prove_home(app: ASGIApp) -> ASGIApp:
    """Return the application with a header in each response that proves which home it serves."""
    proof = make_home_proof(os.environ[LAUNCHER_MARK_VARIABLE])
    header = (HOME_HEADER.encode(), proof.encode())

    async def respond(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_proof(message: Scope) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), header]
            await send(message)

        await app(scope, receive, send_with_proof)

    return respond


def _guard_app(app: ASGIApp, host: str) -> HttpGuard:
    """Return the server behind the guard that checks each request, and the proof of its home."""
    names = os.environ.get("LACHESIS_SERVER_NAMES", "").split(",")
    return HttpGuard(
        _prove_home(app),
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
