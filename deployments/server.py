"""`prefect server start …` that collects garbage in a thread of its own.

A statement of SQLite that an error has left in a reference cycle is finalised by the collector, and that waits while another
thread works on the same connection. If the collector happens to run in the thread of the event loop while that connection waits
for the write lock, whoever has the lock cannot go on, and the whole server stands still for SQLite's 60 s. In its own thread
the collector may wait without harm.
"""

from __future__ import annotations

import gc
import runpy
import sys
import threading
import time

EVERY_S = 1.0
WHOLE = 30
"""Each so many times the old objects are looked through as well."""


def _collect() -> None:
    for count in range(1, sys.maxsize):
        time.sleep(EVERY_S)
        gc.collect(2 if count % WHOLE == 0 else 1)


if __name__ == "__main__":
    gc.disable()
    threading.Thread(target=_collect, daemon=True, name="garbage").start()
    sys.argv[1:1] = ["server", "start"]
    runpy.run_module("prefect", run_name="__main__", alter_sys=True)
