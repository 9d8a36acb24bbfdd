"""Serve the pages of this home on loopback until SIGTERM, as `lachesis serve` starts it."""

from __future__ import annotations

import argparse
import os
import signal
import socket
import threading

from lachesis.base.http_guard import load_or_create_token
from lachesis.web.server import announce_page_server, run_page_server


def _end_with_stdin() -> None:
    """End this process when the one that started it has closed its end of the pipe, or died."""
    # The lock of sys.stdin would abort the interpreter at exit.
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def main() -> None:
    """Parse the arguments and serve."""
    parser = argparse.ArgumentParser(prog="python -m lachesis.web", description=__doc__)
    parser.add_argument("--listener", type=int, required=True, help="number of an open socket")
    listener = socket.socket(fileno=parser.parse_args().listener)
    port = listener.getsockname()[1]
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    # Said before the pages are loaded, which takes a second.
    with announce_page_server(f"http://127.0.0.1:{port}"):
        run_page_server("127.0.0.1", port, load_or_create_token(), listeners=[listener])


if __name__ == "__main__":
    main()
