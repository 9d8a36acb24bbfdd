"""A server that speaks vLLM's `/generate` and says what a test wants, and environments that ask
it.
"""

from __future__ import annotations

import contextlib
import functools
import http.server
import json
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from atroposlib.envs.base import APIServerConfig

from lachesis.environment import TaskEnv
from lachesis.environment_toolkit import sandbox_child
from lachesis.tiny_model import build
from tests.patience import POLL_S

LOGPROB = -0.25
EMPTY_PROGRAM = json.dumps({"program": "", "stdin": "", "cpu_s": 5, "memory": 2**29}) + "\n"


def without_place(reason: str | None) -> str | None:
    """Return a reason without the file and line of its exception, which must be there if there is
    an exception.
    """
    return re.sub(r"(Error) at \w+\.py:\d+", r"\1 somewhere", reason) if reason else reason


@functools.cache
def unconfined() -> str:
    """Why this machine cannot confine a program, as one without Landlock; empty when it can."""
    command = [sys.executable, "-I", "-S", "-B", sandbox_child.__file__]
    done = subprocess.run(command, input=EMPTY_PROGRAM, capture_output=True, text=True, check=False)
    return (
        done.stderr.strip() or "it ended at once"
        if done.returncode == sandbox_child.EXIT_UNCONFINED
        else ""
    )


Answering = Callable[[str, int], list[str]]


class Generator(http.server.ThreadingHTTPServer):
    """`say(prompt, n)` gives the texts. An answer that ends in `…` was cut, any other ends its
    turn; one that is `!500` is an error of the server.
    """

    daemon_threads = True

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(("127.0.0.1", 0), Generate)
        self.tokenizer = tokenizer
        self.say: Answering = lambda prompt, n: ["ok"] * n
        self.bodies: list[dict[str, Any]] = []
        self.url = f"http://127.0.0.1:{self.server_address[1]}/v1"


class Generate(http.server.BaseHTTPRequestHandler):
    server: Generator

    def do_GET(self) -> None:
        self._send(200, {})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append(body)
        tokenizer = self.server.tokenizer
        texts = self.server.say(tokenizer.decode(body["prompt"]["prompt_token_ids"]), body["n"])
        if "!500" in texts:
            self._send(500, {})
            return
        ids = [
            tokenizer.encode(text.removesuffix("…"))
            + [tokenizer.eos_token_id] * (not text.endswith("…"))
            for text in texts
        ]
        self._send(
            200,
            {
                "logprobs": [[[{str(token): LOGPROB}] for token in sequence] for sequence in ids],
                "finish_reasons": ["length" if text.endswith("…") else "stop" for text in texts],
            },
        )

    def _send(self, status: int, answer: dict[str, Any]) -> None:
        content = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        with contextlib.suppress(ConnectionError):
            self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    build.build_tokenizer().save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    return folder


@pytest.fixture
def generator() -> Iterator[Generator]:
    with Generator(build.build_tokenizer()) as server:
        threading.Thread(target=server.serve_forever, args=(POLL_S,), daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture
def made(generator: Generator, tokenizer_folder: Path) -> Callable[..., Any]:
    """A factory: an environment of this class whose server is the generator, with these fields."""

    def make(cls: type[TaskEnv], **fields: Any) -> Any:
        config = cls.config_init()[0]
        values = {
            "tokenizer_name": str(tokenizer_folder),
            "use_wandb": False,
            "group_size": 4,
            **fields,
        }
        server = APIServerConfig(
            server_type="vllm",
            base_url=generator.url,
            api_key="x",
            model_name=str(tokenizer_folder),
            health_check=False,
        )
        return cls(type(config)(**{**config.model_dump(), **values}), [server, server])

    return make
