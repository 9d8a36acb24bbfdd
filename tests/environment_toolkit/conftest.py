"""A server that speaks vLLM's `/generate` and says what a test wants, and environments that ask
it.
"""

import functools
import json
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from atroposlib.envs.base import APIServerConfig

from lachesis.environment_toolkit import sandbox_child
from lachesis.tiny_model import build
from tests.harness.http_answers import Reply, serve_answers

LOGPROB = -0.25
EMPTY_PROGRAM = json.dumps({"program": "", "stdin": "", "cpu_s": 5, "memory": 2**29}) + "\n"


def without_place(reason):
    """Return a reason without the file and line of its exception, which must be there if there is
    an exception.
    """
    return re.sub(r"(Error) at \w+\.py:\d+", r"\1 somewhere", reason) if reason else reason


@functools.cache
def unconfined():
    """Why this machine cannot confine a program, as one without Landlock; empty when it can."""
    command = [sys.executable, "-I", "-S", "-B", sandbox_child.__file__]
    done = subprocess.run(command, input=EMPTY_PROGRAM, capture_output=True, text=True, check=False)
    return (
        done.stderr.strip() or "it ended at once"
        if done.returncode == sandbox_child.EXIT_UNCONFINED
        else ""
    )


Answering = Callable[[str, int], list[str]]


class Generator:
    """`say(prompt, n)` gives the texts. An answer that ends in `…` was cut, any other ends its
    turn; one that is `!500` is an error of the server.
    """

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.say: Answering = lambda prompt, n: ["ok"] * n
        self.bodies: list[dict[str, Any]] = []
        self.url = ""

    def answer(self, request):
        """Return what a client of `/generate` gets."""
        if request.method == "GET":
            return {}
        body, tokenizer = request.json(), self.tokenizer
        self.bodies.append(body)
        texts = self.say(tokenizer.decode(body["prompt"]["prompt_token_ids"]), body["n"])
        if "!500" in texts:
            return Reply(500)
        ids = [
            tokenizer.encode(text.removesuffix("…"))
            + [tokenizer.eos_token_id] * (not text.endswith("…"))
            for text in texts
        ]
        return {
            "logprobs": [[[{str(token): LOGPROB}] for token in sequence] for sequence in ids],
            "finish_reasons": ["length" if text.endswith("…") else "stop" for text in texts],
        }


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    build.build_tokenizer().save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    return folder


@pytest.fixture
def generator():
    generator = Generator(build.build_tokenizer())
    with serve_answers(generator.answer) as url:
        generator.url = f"{url}/v1"
        yield generator


@pytest.fixture
def made(generator, tokenizer_folder):
    """A factory: an environment of this class whose server is the generator, with these fields."""

    def make(cls, **fields):
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
