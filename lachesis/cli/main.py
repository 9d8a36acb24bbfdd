"""Run the command `lachesis`: find one command by its words, run it, and return the exit code.

A bare word acts on runs or starts a server; everything else is NOUN VERB. The functions of the
commands are in `lachesis.cli.commands` and are loaded by their names, so that the help loads none.
Exit codes: 0 done, 1 an error (its code and reason on stderr; with --json as JSON on stdout), 2
wrong arguments, 130 interrupted.
"""

import gc
import json
import os
import shlex
import signal
import sys
from collections.abc import Sequence

from cyclopts import (
    App,
    CycloptsError,
    Group,
    MissingArgumentError,
    Parameter,
    UnknownCommandError,
    UnusedCliTokensError,
)

from lachesis import __version__
from lachesis.base.errors import ArgumentsError, LachesisError, StorageError
from lachesis.base.formatting import suggest
from lachesis.models.transformers_import import leave_out_bitsandbytes

# How many new objects make Python look for garbage.
GARBAGE_THRESHOLD = 50_000

DESCRIPTION = (
    "Train language models with reinforcement learning: find environments, launch, watch and stop "
    "runs, export weights."
)
EPILOG = (
    "Start with `lachesis demo`, or with `lachesis train arithmetic --watch`. "
    "`lachesis COMMAND --help` describes one command. All files are kept under $LACHESIS_HOME."
)
# For each group of the help: a command, its function below `lachesis.cli.commands`, what it does,
# and an example.
GROUPS: dict[str, list[tuple[str, str, str, str]]] = {
    "First steps": [
        ("demo", "demo:demo", "Train a tiny model on sums, and compare it before and after.",
         "lachesis demo --steps 20"),
        ("serve", "servers:serve",
         "Start the Prefect server and the runner here; Ctrl-C ends both.", "lachesis serve"),
        ("doctor", "doctor:doctor", "Check this machine, explain how to install what is missing, "
         "and find what crashed runs left behind.", "lachesis doctor --fix"),
        ("completion", "servers:completion",
         "Print the code with which a shell completes commands and options.",
         'eval "$(lachesis completion bash)"'),
    ],
    "Environments and models": [
        ("env list", "environments:list_environments", "List the environments.",
         "lachesis env list"),
        ("env show", "environments:show_environment", "Show an environment and its fields.",
         "lachesis env show arithmetic"),
        ("env new", "environments:create_environment",
         "Create a working file, for you to change.", "lachesis env new my_task"),
        ("env check", "environments:check_environment", "Check everything that needs no training, "
         "in half a minute and without a server.", "lachesis env check my_task.py"),
        ("env install", "environments:install_requirements", "Install the requirements in the "
         "file's header (PEP 723) in a folder of their own.", "lachesis env install my_task.py"),
        ("test", "inference_tests:run_test",
         "Test an environment before training: let models answer a few of its items.",
         "lachesis test arithmetic --steps 3"),
        ("model list", "models:list_offered_models", "List the models that can be trained, as the "
         "profile's server offers them now.", "lachesis model list --profile tinker"),
        ("model show", "models:show_model", "Show all that is known about a model.",
         "lachesis model show Qwen/Qwen3-8B --profile tinker"),
        ("model build", "models:build_model", "Build a tiny model that learns on a laptop.",
         "lachesis model build --for arithmetic"),
        ("model memory", "models:forecast_memory", "Forecast the memory that a model needs.",
         "lachesis model memory Qwen/Qwen3-8B"),
        ("backend check", "backends:check_backend",
         "Find out whether the trainer can use a server that speaks Tinker.",
         "lachesis backend check http://127.0.0.1:8000"),
        ("backend install", "backends:install_backend", "Make the environment of an engine of "
         "others that a run can start.", "lachesis backend install skyrl"),
    ],
    "Start runs": [
        ("train", "train:train", "Start a run on an environment.",
         "lachesis train arithmetic --set learning_rate=0.001 --watch"),
        ("config", "train:config", "Write a launch file: every field with its meaning, its default "
         "and what is allowed.", "lachesis config arithmetic > RUN.yaml"),
        ("resume", "train:resume", "Resume an ended run from its newest checkpoint, or from the "
         "beginning if it has none; a completed one with more steps.",
         "lachesis resume @last --set total_steps=200 --watch"),
    ],
    "Look at runs": [
        ("runs", "run_list:runs",
         "List the runs: progress, rewards, held-out results, and how they differ.",
         "lachesis runs --env arithmetic --sort held-out"),
        ("status", "run_status:status", "Show one run: phase, processes, metrics, and its results "
         "once it has ended.", "lachesis status @last"),
        ("watch", "watch:watch",
         "Show the progress of runs until they end; Ctrl-C leaves them running.",
         "lachesis watch @last"),
        ("logs", "logs:logs", "Show the log of one process of a run.", "lachesis logs @last -f"),
        ("metrics", "metrics:metrics", "Show the metrics of a run, step by step.",
         "lachesis metrics @last --csv"),
        ("rollouts", "rollouts:rollouts", "Show what the model answered, and the scores.",
         "lachesis rollouts @last --step last --worst 3"),
        ("compare", "comparison:compare",
         "Compare runs: settings that differ, rewards, held-out results, curves.",
         "lachesis compare 1f3a 9c0b"),
        ("report", "run_status:report", "Write the report of a run, or the comparison of several, "
         "as one self-contained HTML file.", "lachesis report @last --to report"),
        ("open", "run_status:open_page", "Open the page of a run in a browser.",
         "lachesis open @last"),
    ],
    "Change runs": [
        ("edit", "run_changes:edit", "Change the name, the note or the tags of a run.",
         "lachesis edit @last --note 'higher learning rate' --tag sweep"),
        ("stop", "run_changes:stop", "Stop a run; it saves a checkpoint first.",
         "lachesis stop @last"),
        ("rm", "run_changes:remove", "Remove ended runs with all their files, after a question.",
         "lachesis rm 1f3a 9c0b"),
    ],
    "Use what was trained": [
        ("export", "export:export",
         "Export a run's adapter for PEFT, and compare it with the trained model.",
         "lachesis export @last --checkpoint best --to adapter"),
        ("ask", "chat:ask", "Ask the trained model a question.",
         "lachesis ask @last '3+4=' --checkpoint best"),
        ("chat", "chat:chat", "Talk to the trained model.", "lachesis chat @last"),
        ("serve-model", "chat:serve_model",
         "Serve the trained model as OpenAI's API does, until Ctrl-C.",
         "lachesis serve-model @last --port 8000"),
    ],
    "Serve people and agents": [
        ("ui", "servers:ui",
         "Serve pages that show the runs: curves while they train, rollouts, comparisons.",
         "lachesis ui"),
        ("mcp", "servers:mcp", "Serve the tools to an agent by the Model Context Protocol.",
         "lachesis mcp"),
        ("api", "servers:api", "Serve the tools as plain HTTP routes, with a page at /docs.",
         "lachesis api --port 8080"),
        ("notifications set", "servers:set_webhook", "Call a webhook from the Prefect server when "
         "a run fails, stalls or finishes.",
         "lachesis notifications set https://example.org/hook"),
        ("notifications rm", "servers:remove_webhook", "Call no webhook any more.",
         "lachesis notifications rm"),
    ],
}  # fmt: skip
COMMANDS = [words for commands in GROUPS.values() for words, *_ in commands]
NOUNS = {
    "env": "Find environments, create one of your own, or check one.",
    "model": "Find models that can be trained, or build a tiny one.",
    "backend": "Use engines of others.",
    "notifications": "Call a webhook when a run fails, stalls or finishes.",
}
# What people type who know the commands of other tools, or earlier words.
OTHER_WORDS = {
    "envs": "env list",
    "environments": "env list",
    "models": "model list",
    "results": "status",
    "weights": "export",
    "list": "runs",
    "ls": "runs",
    "start": "train",
}


def build_app() -> App:
    """Return the application with every command; no function of a command is loaded."""
    app = App(
        name="lachesis",
        help=DESCRIPTION,
        help_epilogue=EPILOG,
        help_format="plaintext",
        version=__version__,
        default_parameter=Parameter(negative=(), show_default=False),
        result_action="return_value",
        exit_on_error=False,
        print_error=False,
        help_on_error=False,
        suppress_keyboard_interrupt=False,
    )
    for title, commands in GROUPS.items():
        group = Group.create_ordered(title)
        for position, (words, function, text, example) in enumerate(commands):
            noun, _, verb = words.rpartition(" ")
            parent = app
            if noun:
                if noun not in app:
                    app.command(
                        App(
                            name=noun,
                            help=NOUNS[noun],
                            help_epilogue=f"`lachesis {noun} VERB --help` describes one verb.",
                            group=group,
                            sort_key=position,
                        )
                    )
                parent = app[noun]
            parent.command(
                f"lachesis.cli.commands.{function}",
                name=verb,
                help=text,
                help_epilogue=f"example: {example}",
                group=None if noun else group,
                sort_key=position,
            )
    return app


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    if argv is None:  # The process ends with this command.
        leave_out_bitsandbytes()
        # Most objects of a command live until its end; looking for garbage takes a tenth of it.
        gc.set_threshold(GARBAGE_THRESHOLD)
    words = list(sys.argv[1:] if argv is None else argv)
    as_json = "--json" in words
    app = build_app()
    os.umask(0o077)  # prompts, answers and weights are readable by their owner only
    # Lets `demo` end the processes that it has started.
    signal.signal(signal.SIGTERM, _raise_interrupt)
    try:
        return app(words or ["--help"]) or 0
    except CycloptsError as error:
        problem = ArgumentsError(_describe_usage_error(error, words))
        raise SystemExit(_print_error(problem, as_json=as_json, exit_code=2)) from None
    except LachesisError as error:
        return _print_error(error, as_json=as_json)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        return _print_error(
            StorageError(f"{error.filename or 'a file'}: {error.strerror or error}"),
            as_json=as_json,
        )


def _describe_usage_error(error: CycloptsError, words: Sequence[str]) -> str:
    """Return the mistake in the words of a command, with the nearest right word."""
    if isinstance(error, UnknownCommandError):
        return _describe_unknown_command(words)
    command = " ".join(words[:2])
    if command not in COMMANDS:
        command = words[0]
    if isinstance(error, MissingArgumentError) and error.argument and not error.tokens_so_far:
        problem = f"{error.argument.name} is missing"
    elif isinstance(error, UnusedCliTokensError):
        problem = f"nothing is meant by {shlex.join(error.unused_tokens or ())}"
    else:
        problem = " ".join(str(error).split()).rstrip(".")
    return f"{problem}; `lachesis {command} --help` describes the command"


def _describe_unknown_command(words: Sequence[str]) -> str:
    """Return which command, or which verb of a noun, is meant by a word that is none."""
    word = words[0]
    if word in NOUNS:
        verbs = [command.split()[1] for command in COMMANDS if command.startswith(f"{word} ")]
        verb = next((word for word in words[1:] if not word.startswith("-")), "")
        return f"`{word} {verb}` is not known{suggest(verb, verbs)}; allowed: {', '.join(verbs)}"
    if word in OTHER_WORDS:
        return f"{word!r} is not known; use `lachesis {OTHER_WORDS[word]}`"
    commands = [command.split()[0] for command in COMMANDS]
    return f"{word!r} is not known{suggest(word, commands)}; `lachesis --help` lists the commands"


def _print_error(error: LachesisError, *, as_json: bool, exit_code: int = 1) -> int:
    """Print an error to the terminal or as JSON, and return the exit code."""
    if as_json:
        from lachesis.base.json_text import error_to_payload

        print(json.dumps(error_to_payload(error), indent=2, default=str))
    else:
        from lachesis.cli import terminal

        terminal.print_sentence(f"{error.code}: {error}", terminal.stderr_console)
    return exit_code


def _raise_interrupt(*_: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
