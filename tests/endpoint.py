"""A server with OpenAI's chat route. The name of the model says what it does: it adds two numbers,
or fails in a certain way.
"""

from __future__ import annotations

import contextlib
import http.server
import itertools
import json
import re
import threading
import time
from collections.abc import Iterator
from typing import Any

from tests.patience import POLL_S


class Endpoint(http.server.ThreadingHTTPServer):
    """The address ends in /v1. Models: right, never, sometimes, status-N, cut, slow, echo (answers
    with the key that it was sent); any other name adds rightly. A request with `stream` gets its
    answer in events.
    """

    daemon_threads = True

    def __init__(self, latency_s: float = 0.0) -> None:
        super().__init__(("127.0.0.1", 0), Chat)
        self.url = f"http://127.0.0.1:{self.server_address[1]}/v1"
        self.key = "sk-test-4f1d9c"
        self.keys: set[str] = set()
        self.last: dict[str, Any] = {}
        self.latency_s = latency_s
        self.count = itertools.count()


class Chat(http.server.BaseHTTPRequestHandler):
    server: Endpoint

    def do_GET(self) -> None:
        self.server.keys.add(self.headers["Authorization"])
        self._send(
            200,
            {
                "object": "list",
                "data": [{"id": "right", "object": "model", "created": 0, "owned_by": "tests"}],
            },
        )

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        key = self.headers["Authorization"]
        self.server.keys.add(key)
        self.server.last = body
        time.sleep(self.server.latency_s)
        model = body["model"]
        if model.startswith("status-"):
            self._send(
                int(model.removeprefix("status-")),
                {"error": {"message": f"refused {key}", "type": "test"}},
            )
        elif body.get("stream"):
            self._stream(self._answer(body))
        elif model == "slow":
            time.sleep(60)
        else:
            self._send(200, self._answer(body), cut=model == "cut")

    def _answer(self, body: dict[str, Any]) -> dict[str, Any]:
        total = sum(int(number) for number in re.findall(r"\d+", body["messages"][-1]["content"]))
        choices = []
        for index in range(body.get("n") or 1):
            wrong = body["model"] == "never" or (
                body["model"] == "sometimes" and next(self.server.count) % 2
            )
            content = (
                self.headers["Authorization"] if body["model"] == "echo" else str(total + wrong)
            )
            message = {"role": "assistant", "content": content}
            choices.append(
                {"index": index, "message": message, "finish_reason": "length" if wrong else "stop"}
            )
        usage = {
            "prompt_tokens": 5,
            "completion_tokens": 2 * len(choices),
            "total_tokens": 5 + 2 * len(choices),
        }
        head = {"id": "c", "object": "chat.completion", "created": 0, "model": body["model"]}
        return {**head, "choices": choices, "usage": usage}

    def _stream(self, answer: dict[str, Any]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        for letter in answer["choices"][0]["message"]["content"]:
            choice = {"index": 0, "delta": {"content": letter}, "finish_reason": None}
            event = {
                **answer,
                "object": "chat.completion.chunk",
                "choices": [choice],
                "usage": None,
            }
            self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
            self.wfile.flush()
        self.wfile.write(b"data: [DONE]\n\n")

    def _send(self, status: int, answer: dict[str, Any], *, cut: bool = False) -> None:
        content = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        if 300 <= status < 400:
            self.send_header("Location", "http://127.0.0.1:9/elsewhere")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content[: len(content) // 2] if cut else content)
        if cut:
            self.close_connection = True

    def log_message(self, *_: Any) -> None:
        pass

    def handle(self) -> None:
        with contextlib.suppress(ConnectionError):  # a client that was ended
            super().handle()


@contextlib.contextmanager
def serving(latency_s: float = 0.0) -> Iterator[Endpoint]:
    with Endpoint(latency_s) as server:
        threading.Thread(target=server.serve_forever, args=(POLL_S,), daemon=True).start()
        yield server
        server.shutdown()
