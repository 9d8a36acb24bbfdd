"""Run `lachesis ask`, `lachesis chat` and `lachesis serve-model`: use what was trained."""

from __future__ import annotations

import argparse
import contextlib
import sys
import threading
from collections.abc import Iterator

import httpx

from lachesis.base.errors import ArgumentsError, EngineRequestError
from lachesis.base.http_guard import describe_token_location, load_or_create_token
from lachesis.base.json_text import Json
from lachesis.cli import console
from lachesis.cli.console import print_answer
from lachesis.config.profiles import adopt_profile_keys
from lachesis.config.run_config import RunConfig
from lachesis.operations.service import LachesisService
from lachesis.supervision.serve_model import ModelEndpoint, select_checkpoint, serve_run_model
from lachesis.supervision.services.ports import check_port

# Seconds that an answer may take.
ANSWER_TIMEOUT_S = 600.0
END_WORDS = ("/exit", "/quit")


def handle_ask(args: argparse.Namespace) -> None:
    """Print the model's answers to one question.

    Raises:
        EngineRequestError: The model cannot answer, for example because the text is too long.
    """
    question = sys.stdin.read().strip() if args.question == "-" else args.question
    if not question:
        raise ArgumentsError("the question is empty; give a text, or - to read the standard input")
    with _serve(args) as endpoint:
        answers = complete(endpoint, [{"role": "user", "content": question}], args)
    answer = {
        "run_id": args.run,
        "step": endpoint.step,
        "model": endpoint.model,
        "question": question,
        "answers": answers,
    }
    print_answer(args, answer, "\n\n".join(answers))


def handle_chat(args: argparse.Namespace) -> None:
    """Talk to the model until the end of the input.

    Raises:
        ArgumentsError: --json was given; `lachesis ask` is for programs.
    """
    if args.json:
        raise ArgumentsError(
            "a conversation is for a person; `lachesis ask RUN TEXT --json` is for programs"
        )
    with _serve(args) as endpoint:
        console.print_note(
            f"talking to {endpoint.description} of run {args.run}; /new begins again, Ctrl-D ends"
        )
        messages: list[Json] = []
        while (line := _read_line()) is not None:
            if line == "/new":
                messages = []
            elif line:
                messages = _answer_line(endpoint, messages, line, args)


def _answer_line(
    endpoint: ModelEndpoint, messages: list[Json], line: str, args: argparse.Namespace
) -> list[Json]:
    """Print the answer to a line, and return the conversation with both.

    A line that the model cannot answer is left out of the conversation.
    """
    conversation = [*messages, {"role": "user", "content": line}]
    try:
        (answer,) = complete(endpoint, conversation, args)
    except EngineRequestError as error:
        console.print_note(f"{error}; /new begins a new conversation")
        return messages
    console.print_sentence(answer)
    return [*conversation, {"role": "assistant", "content": answer}]


def _read_line() -> str | None:
    """Return the next line of the input, or None at its end or for a word that ends it."""
    try:
        line = input("> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        return None
    return None if line in END_WORDS else line


def handle_serve_model(args: argparse.Namespace) -> int:
    """Serve the model until Ctrl-C."""
    check_port(args.port)
    with _serve(args, port=args.port, token=load_or_create_token()) as endpoint:
        answer = {"url": endpoint.url, "model": endpoint.model, "step": endpoint.step}
        text = (
            f"{endpoint.description} of run {args.run}, as OpenAI's API serves models\n"
            f"base URL  {endpoint.url}\n"
            f"model     {endpoint.model}\n"
            f"API key   the token in {describe_token_location()}\n"
            "Ctrl-C ends it."
        )
        print_answer(args, answer, text)
        sys.stdout.flush()
        # Ctrl-C interrupts the wait; leaving the block ends the processes.
        threading.Event().wait()
    return 0


@contextlib.contextmanager
def _serve(
    args: argparse.Namespace, *, port: int | None = None, token: str | None = None
) -> Iterator[ModelEndpoint]:
    """Serve the checkpoint that was named, with a note while it is loaded."""
    service = LachesisService()
    record = service.store.load(args.run)
    run_dir = service.store.dir(record.run_id)
    manifest = select_checkpoint(run_dir, args.checkpoint)
    backend = RunConfig.from_yaml(run_dir.config).tinker.backend
    adopt_profile_keys(record.profile, backend=backend)
    if not args.json:
        what = f"step {manifest.step}" if manifest else "the base model"
        console.print_note(f"loading {what} of run {record.run_id} (some seconds)")
    with serve_run_model(record, run_dir, manifest, port=port, token=token) as endpoint:
        yield endpoint


def complete(endpoint: ModelEndpoint, messages: list[Json], args: argparse.Namespace) -> list[str]:
    """Return the model's answers to a conversation; with --raw, its continuations of the text.

    Raises:
        EngineRequestError: The model refuses the request.
    """
    body: Json = {
        "model": endpoint.model,
        "n": getattr(args, "samples", 1),
        "max_tokens": args.max_tokens,
        "temperature": args.temperature,
    }
    route = "chat/completions"
    if args.raw:
        route, body["prompt"] = "completions", "\n".join(one["content"] for one in messages)
    else:
        body["messages"] = messages
    response = httpx.post(
        f"{endpoint.url}/{route}",
        json=body,
        headers={"Authorization": f"Bearer {endpoint.token}"},
        timeout=ANSWER_TIMEOUT_S,
        trust_env=False,
    )
    content = response.json()
    if response.status_code != 200:
        raise EngineRequestError(_read_error(content))
    if args.raw:
        return [str(choice["text"]) for choice in content["choices"]]
    return [str(choice["message"]["content"]) for choice in content["choices"]]


def _read_error(content: Json) -> str:
    error = content.get("error")
    text = str(error["message"] if isinstance(error, dict) else error or content)
    if "chat template" in text:
        return f"{text}; --raw sends the text without one"
    return text
