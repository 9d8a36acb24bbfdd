"""Run the pages that show the runs beside the Prefect server and the runner.

The pages only read, so nothing depends on them: when their process dies it is started again, and
when it cannot be started the launcher goes on without it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from lachesis.base.bounded_child import signal_group
from lachesis.base.errors import LachesisError
from lachesis.base.http_guard import load_or_create_token
from lachesis.base.secrets import build_child_env
from lachesis.config.value_parsing import read_env_number
from lachesis.supervision.leftovers import LAUNCHER_MARK_VARIABLE
from lachesis.supervision.process_marks import build_mark
from lachesis.supervision.services.ports import open_listener
from lachesis.web.server import PREFERRED_PORT, find_page_server
from lachesis.web.sign_in import make_sign_in_link

# Seconds after which a process that has died is started again, and that its end may take.
RESTART_PAUSE_S, END_TIMEOUT_S = 30.0, 10.0
# The port of the pages; 0 serves none.
PORT_VARIABLE = "LACHESIS_PAGES_PORT"


class PageServer:
    """Hold the process that serves the pages of a home."""

    def __init__(self, home: Path) -> None:
        self.home = home
        # Kept open, so that the pages are served at the same address when they are started again.
        self._listener: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._started_at = 0.0

    def start(self) -> None:
        """Start the process unless the pages are served already, and print the link to them."""
        try:
            port = int(read_env_number(PORT_VARIABLE, PREFERRED_PORT, min_value=0))
            # Somebody has started `lachesis ui` before.
            running_at = find_page_server(self.home)
            if not port:
                return
            address = running_at or self._start_at(port)
            print(f"pages: {make_sign_in_link(address, load_or_create_token())}", flush=True)
        except (LachesisError, OSError) as error:
            print(f"the pages are not served: {error}", file=sys.stderr, flush=True)

    def _start_at(self, port: int) -> str:
        """Start the process on the port, or a free one if that is in use; return its address."""
        self._listener = open_listener(port)
        self._spawn(self._listener)
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def restart_if_dead(self) -> None:
        """Start the process again if it has died some time ago."""
        if not self._listener or not self._process or self._process.poll() is None:
            return
        if time.monotonic() - self._started_at > RESTART_PAUSE_S:
            # A full disk must not end the launcher, and all runs with it.
            with contextlib.suppress(OSError):
                self._close_pipe()
                self._spawn(self._listener)

    def end(self) -> None:
        """End the process."""
        if self._listener:
            self._listener.close()
        if self._process is None:
            return
        signal_group(self._process.pid, signal.SIGTERM)
        self._close_pipe()
        try:
            self._process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            signal_group(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def _close_pipe(self) -> None:
        if self._process is not None and self._process.stdin:
            self._process.stdin.close()

    def _spawn(self, listener: socket.socket) -> None:
        names = ("LACHESIS_HOME", "LACHESIS_TOKEN", "PREFECT_API_URL", "PREFECT_API_AUTH_STRING")
        passed_variables = {name: os.environ[name] for name in names if name in os.environ}
        with (self.home / "logs" / "pages.log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "lachesis.web", "--listener", str(listener.fileno())],
                pass_fds=[listener.fileno()],
                env=build_child_env(
                    {**passed_variables, LAUNCHER_MARK_VARIABLE: build_mark(self.home)}
                ),
                # It ends when this pipe closes, however the launcher has ended.
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._started_at = time.monotonic()
