"""Run `lachesis ask`, `lachesis chat` and `lachesis serve-model`: use a trained model."""

import sys
import threading
from contextlib import AbstractContextManager
from typing import Annotated

from cyclopts import Parameter

from lachesis.base.argparse_types import GROUP_SIZE, NUM_TOKENS, PORT, TEMPERATURE
from lachesis.base.errors import ArgumentsError, EngineRequestError
from lachesis.base.http_client import request_service
from lachesis.base.http_guard import describe_token_location, load_or_create_token
from lachesis.base.json_text import Json
from lachesis.cli import terminal
from lachesis.cli.options import CHECKPOINT_HELP, Output, Run, number, options_class
from lachesis.cli.terminal import print_answer
from lachesis.operations.server import check_port
from lachesis.operations.weights import ModelEndpoint, serve_run
from lachesis.runs.store import RunStore

# Seconds that an answer may take.
ANSWER_TIMEOUT_S = 600.0
END_WORDS = ("/exit", "/quit")


@options_class
class ServedCheckpoint(Output):
    """Which weights of a run are served."""

    checkpoint: Annotated[
        str,
        Parameter(
            help=f"{CHECKPOINT_HELP}, or base for the model before training",
            metavar="best|last|STEP|base",
        ),
    ] = "last"


@options_class
class AnswerOptions(ServedCheckpoint):
    """How the model answers."""

    max_tokens: Annotated[int, number(NUM_TOKENS, "tokens of an answer at most", default=256)] = 256
    temperature: Annotated[
        float,
        number(
            TEMPERATURE, "0 for the most probable answer (default), 1 for samples as in training"
        ),
    ] = 0.0
    raw: Annotated[bool, Parameter(help="continue the text itself, without a chat template")] = (
        False
    )


def ask(
    run: Run,
    question: Annotated[
        str, Parameter(help="a text, or - to read the standard input", allow_leading_hyphen=True)
    ],
    /,
    *,
    samples: Annotated[int, number(GROUP_SIZE, "answers", "--samples", "-n", default=1)] = 1,
    options: AnswerOptions = AnswerOptions(),
) -> None:
    """Print the model's answers to one question.

    Raises:
        EngineRequestError: The model cannot answer, for example because the text is too long.
    """
    question = sys.stdin.read().strip() if question == "-" else question
    if not question:
        raise ArgumentsError("the question is empty; type a question, or - to read standard input")
    with _serve(run, options) as endpoint:
        messages = [{"role": "user", "content": question}]
        answers = complete(endpoint, messages, options, samples=samples)
    answer = {
        "run_id": run,
        "step": endpoint.step,
        "model": endpoint.model,
        "question": question,
        "answers": answers,
    }
    print_answer(options, answer, "\n\n".join(answers))


def chat(run: Run, /, *, options: AnswerOptions = AnswerOptions()) -> None:
    """Talk to the model until the end of the input.

    Raises:
        ArgumentsError: --json was given; `lachesis ask` is for programs.
    """
    if options.json:
        raise ArgumentsError(
            "a conversation is for a person; `lachesis ask RUN TEXT --json` is for programs"
        )
    with _serve(run, options) as endpoint:
        terminal.print_note(
            f"talking to {endpoint.description} of run {run}; /new begins again, Ctrl-D ends"
        )
        messages: list[Json] = []
        while (line := _read_line()) is not None:
            if line == "/new":
                messages = []
            elif line:
                messages = _answer_line(endpoint, messages, line, options)


def _answer_line(
    endpoint: ModelEndpoint, messages: list[Json], line: str, options: AnswerOptions
) -> list[Json]:
    """Print the answer to a line, and return the conversation with both.

    A line that the model cannot answer is left out of the conversation.
    """
    conversation = [*messages, {"role": "user", "content": line}]
    try:
        (answer,) = complete(endpoint, conversation, options)
    except EngineRequestError as error:
        terminal.print_note(f"{error}; /new begins a new conversation")
        return messages
    terminal.print_sentence(answer)
    return [*conversation, {"role": "assistant", "content": answer}]


def _read_line() -> str | None:
    """Return the next line of the input, or None at its end or for a word that ends it."""
    try:
        line = input("> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        return None
    return None if line in END_WORDS else line


def serve_model(
    run: Run,
    /,
    *,
    port: Annotated[int, number(PORT, "port to listen on", default=8000)] = 8000,
    options: ServedCheckpoint = ServedCheckpoint(),
) -> None:
    """Serve the model until Ctrl-C."""
    check_port(port)
    with _serve(run, options, port=port, token=load_or_create_token()) as endpoint:
        answer = {"url": endpoint.url, "model": endpoint.model, "step": endpoint.step}
        text = (
            f"{endpoint.description} of run {run}, as OpenAI's API serves models\n"
            f"base URL  {endpoint.url}\n"
            f"model     {endpoint.model}\n"
            f"API key   the token in {describe_token_location()}\n"
            "Ctrl-C ends it."
        )
        print_answer(options, answer, text)
        sys.stdout.flush()
        # Ctrl-C interrupts the wait; leaving the block ends the processes.
        threading.Event().wait()


def _serve(
    run_id: str, options: ServedCheckpoint, *, port: int | None = None, token: str | None = None
) -> AbstractContextManager[ModelEndpoint]:
    """Serve the checkpoint that was named, with a note while it is loaded."""

    def announce(text: str) -> None:
        if not options.json:
            terminal.print_note(text)

    return serve_run(RunStore(), run_id, options.checkpoint, announce, port=port, token=token)


def complete(
    endpoint: ModelEndpoint, messages: list[Json], options: AnswerOptions, *, samples: int = 1
) -> list[str]:
    """Return the model's answers to a conversation; with --raw, its continuations of the text.

    Raises:
        EngineRequestError: The model refuses the request.
    """
    body: Json = {
        "model": endpoint.model,
        "n": samples,
        "max_tokens": options.max_tokens,
        "temperature": options.temperature,
    }
    route = "chat/completions"
    if options.raw:
        route, body["prompt"] = "completions", "\n".join(one["content"] for one in messages)
    else:
        body["messages"] = messages
    response = request_service(
        "POST",
        f"{endpoint.url}/{route}",
        json=body,
        headers={"Authorization": f"Bearer {endpoint.token}"},
        timeout=ANSWER_TIMEOUT_S,
    )
    content = response.json()
    if response.status_code != 200:
        raise EngineRequestError(_read_error(content))
    if options.raw:
        return [str(choice["text"]) for choice in content["choices"]]
    return [str(choice["message"]["content"]) for choice in content["choices"]]


def _read_error(content: Json) -> str:
    error = content.get("error")
    text = str(error["message"] if isinstance(error, dict) else error or content)
    if "chat template" in text:
        return f"{text}; --raw sends the text without one"
    return text
