"""Serve the pages of this home on loopback until SIGTERM, as `lachesis serve` starts it."""

import argparse
import socket

from lachesis.base.http_guard import load_or_create_token
from lachesis.base.managed_process import end_with_parent
from lachesis.web.server import announce_page_server, run_page_server


def main() -> None:
    """Parse the arguments and serve."""
    end_with_parent()
    parser = argparse.ArgumentParser(prog="python -m lachesis.web", description=__doc__)
    parser.add_argument("--listener", type=int, required=True, help="number of an open socket")
    listener = socket.socket(fileno=parser.parse_args().listener)
    port = listener.getsockname()[1]
    # Said before the pages are loaded, which takes a second.
    with announce_page_server(f"http://127.0.0.1:{port}"):
        run_page_server("127.0.0.1", port, load_or_create_token(), listeners=[listener])


if __name__ == "__main__":
    main()
