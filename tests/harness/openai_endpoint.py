"""A server with OpenAI's chat route. The name of the model says what it does: it adds two numbers,
or fails in a certain way.
"""

import contextlib
import itertools
import json
import re
import time
from collections.abc import Iterator
from typing import Any

from tests.harness.http_answers import Reply, Request, serve_answers

MODELS = [{"id": "right", "object": "model", "created": 0, "owned_by": "tests"}]


class Endpoint:
    """The address ends in /v1. Models: right, never, sometimes, status-N, cut, slow, echo (answers
    with the key that it was sent); any other name adds rightly. A request with `stream` gets its
    answer in events.
    """

    def __init__(self, latency_s: float = 0.0) -> None:
        self.url = ""
        self.key = "sk-test-4f1d9c"
        self.keys: set[str] = set()
        self.last: dict[str, Any] = {}
        self.latency_s = latency_s
        self.count = itertools.count()

    def answer(self, request: Request) -> Reply:
        """Return what a client gets."""
        key = request.headers["Authorization"]
        self.keys.add(key)
        if request.method == "GET":
            return Reply(content={"object": "list", "data": MODELS})
        body = self.last = request.json()
        time.sleep(self.latency_s)
        model = body["model"]
        if model.startswith("status-"):
            status = int(model.removeprefix("status-"))
            moved = {"Location": "http://127.0.0.1:9/elsewhere"} if 300 <= status < 400 else {}
            error = {"error": {"message": f"refused {key}", "type": "test"}}
            return Reply(status, error, moved)
        if model == "slow":
            time.sleep(60)
        completion = self._complete(body, key)
        if body.get("stream"):
            return Reply(content=stream(completion), headers={"Content-Type": "text/event-stream"})
        return Reply(content=completion, is_cut=model == "cut")

    def _complete(self, body: dict[str, Any], key: str) -> dict[str, Any]:
        total = sum(int(number) for number in re.findall(r"\d+", body["messages"][-1]["content"]))
        model, choices = body["model"], []
        for index in range(body.get("n") or 1):
            wrong = model == "never" or (model == "sometimes" and next(self.count) % 2)
            content = key if model == "echo" else str(total + wrong)
            message = {"role": "assistant", "content": content}
            choices.append(
                {"index": index, "message": message, "finish_reason": "length" if wrong else "stop"}
            )
        sampled = 2 * len(choices)
        usage = {"prompt_tokens": 5, "completion_tokens": sampled, "total_tokens": 5 + sampled}
        head = {"id": "c", "object": "chat.completion", "created": 0, "model": model}
        return {**head, "choices": choices, "usage": usage}


def stream(completion: dict[str, Any]) -> Iterator[bytes]:
    """Yield the first answer letter by letter, as events."""
    for letter in completion["choices"][0]["message"]["content"]:
        choice = {"index": 0, "delta": {"content": letter}, "finish_reason": None}
        changed = {"object": "chat.completion.chunk", "choices": [choice], "usage": None}
        yield f"data: {json.dumps({**completion, **changed})}\n\n".encode()
    yield b"data: [DONE]\n\n"


@contextlib.contextmanager
def serving(latency_s: float = 0.0) -> Iterator[Endpoint]:
    """Serve an endpoint within the block."""
    endpoint = Endpoint(latency_s)
    with serve_answers(endpoint.answer) as url:
        endpoint.url = f"{url}/v1"
        yield endpoint
