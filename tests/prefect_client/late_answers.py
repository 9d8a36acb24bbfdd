"""A proxy before a real Prefect server, which loses or delays what is asked or answered."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal

import httpx

from lachesis.prefect_client.serve_info import HOME_HEADER

Fault = Literal["none", "answer late", "answer lost", "request lost", "refused", "busy"]


class LateAnswers:
    """Hold which fault the next submissions meet; all other requests are only passed on."""

    def __init__(self, server: str) -> None:
        self.server = server
        self.fault: Fault = "none"
        self.delay_s = 0.0
        self.url = ""
        self.num_submissions = 0


@contextlib.contextmanager
def delay_answers(server: str) -> Iterator[LateAnswers]:
    """Run the proxy; its `url` takes the place of the server's, which ends with `/api`."""
    faults = LateAnswers(server.removesuffix("/api"))

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def do_request(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            is_submission = self.path.endswith("/create_flow_run")
            faults.num_submissions += is_submission
            fault = faults.fault if is_submission else "none"
            if fault == "request lost":
                return
            if fault in ("refused", "busy"):
                self._answer(409 if fault == "refused" else 503, b"no", "")
                return
            response = httpx.request(
                self.command,
                faults.server + self.path,
                content=body,
                headers={"Content-Type": "application/json"},
                trust_env=False,
            )
            if fault == "answer lost":
                return
            if fault == "answer late":
                time.sleep(faults.delay_s)
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                proof = response.headers.get(HOME_HEADER, "")
                self._answer(response.status_code, response.content, proof)

        def _answer(self, status: int, content: bytes, proof: str) -> None:
            self.send_response(status)
            if proof:
                self.send_header(HOME_HEADER, proof)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = do_PATCH = do_request

    proxy = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    proxy.daemon_threads = True
    thread = threading.Thread(target=proxy.serve_forever, daemon=True)
    thread.start()
    faults.url = f"http://127.0.0.1:{proxy.server_address[1]}/api"
    try:
        yield faults
    finally:
        proxy.shutdown()
        proxy.server_close()
        thread.join()
