"""An HTTP server in a thread of the test, which answers each request by a function."""

import contextlib
import http.server
import json
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from tests.harness.waiting import POLL_S


@dataclass
class Request:
    """Hold one request of a client."""

    method: str
    path: str
    body: bytes
    headers: Any

    def json(self) -> Any:
        """Return the body as JSON; an empty one is an empty object."""
        return json.loads(self.body or b"{}")


@dataclass
class Reply:
    """Hold what the client gets.

    Bytes are sent as they are, pieces of bytes one by one without a length, all else as JSON.
    `is_cut` breaks the line in the middle of the body.
    """

    status: int = 200
    content: Any = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)
    is_cut: bool = False


Answering = Callable[[Request], Any]
"""Returns a `Reply`, a value that is sent as JSON, or None where the line is closed."""


@contextlib.contextmanager
def serve_answers(answer: Answering, protocol: str = "HTTP/1.0") -> Iterator[str]:
    """Serve within the block, and yield the address."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = protocol

        def do_request(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            reply = answer(Request(self.command, self.path, body, self.headers))
            if reply is None:
                self.close_connection = True
            else:
                self._send(reply if isinstance(reply, Reply) else Reply(content=reply))

        def _send(self, reply: Reply) -> None:
            content = reply.content
            is_json = isinstance(content, (dict, list, str, bool, int, float))
            body = json.dumps(content).encode() if is_json else content
            headers = {"Content-Type": "application/json"} if is_json else {}
            if isinstance(body, bytes):
                headers["Content-Length"] = str(len(body))
            self.send_response(reply.status)
            for name, value in {**headers, **reply.headers}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self._write(body, is_cut=reply.is_cut)

        def _write(self, body: bytes | Iterable[bytes], *, is_cut: bool) -> None:
            pieces = [body] if isinstance(body, bytes) else body
            for piece in pieces:
                self.wfile.write(piece[: len(piece) // 2] if is_cut else piece)
                self.wfile.flush()
            self.close_connection |= is_cut

        do_GET = do_POST = do_PUT = do_PATCH = do_HEAD = do_request

        def handle(self) -> None:
            with contextlib.suppress(ConnectionError):  # a client that was ended
                super().handle()

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(POLL_S,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
