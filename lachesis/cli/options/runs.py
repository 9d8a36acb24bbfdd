"""Declare the arguments of the commands that show, compare, change and end runs."""

from __future__ import annotations

import argparse

from lachesis.base.argparse_types import (
    GROUP_SIZE,
    NUM_LINES,
    NUM_ROLLOUTS,
    NUM_RUNS,
    NUM_TOKENS,
    PORT,
    TEMPERATURE,
)
from lachesis.cli.options.common import CHECKPOINT_HELP, AddCommand, add_run, add_runs

SORT_KEYS = ("created", "reward", "held-out", "steps", "duration", "name")


def add_view_commands(add_command: AddCommand) -> None:
    """Add the commands that show runs."""
    _add_runs(
        add_command(
            "runs",
            "List the runs: progress, rewards, held-out results, and how they differ.",
            "lachesis runs --env arithmetic --sort held-out",
        )
    )
    add_run(
        add_command("status", "Show one run: phase, processes, metrics.", "lachesis status @last")
    )
    watch = add_command(
        "watch",
        "Show the progress of runs until they end; Ctrl-C leaves them running.",
        "lachesis watch @last",
    )
    add_runs(watch, minimum=0)
    _add_logs(
        add_command("logs", "Show the log of one process of a run.", "lachesis logs @last -f")
    )
    _add_data_commands(add_command)
    _add_result_commands(add_command)


def _add_data_commands(add_command: AddCommand) -> None:
    """Add the commands that show what a run has recorded."""
    metrics = add_command(
        "metrics", "Show the metrics of a run, step by step.", "lachesis metrics @last --csv"
    )
    add_run(metrics)
    metrics.add_argument(
        "--csv",
        action="store_true",
        help="print all metrics of all steps as CSV, one line per step; empty where there is none",
    )
    _add_rollouts(
        add_command(
            "rollouts",
            "Show what the model answered, and the scores.",
            "lachesis rollouts @last --step last --worst 3",
        )
    )


def _add_result_commands(add_command: AddCommand) -> None:
    """Add the commands that show what has come of runs."""
    compare = add_command(
        "compare",
        "Compare runs: settings that differ, rewards, held-out results, curves.",
        "lachesis compare 1f3a 9c0b --html comparison.html",
    )
    add_runs(compare, minimum=1)
    compare.add_argument("--html", metavar="FILE", help="also write a page with the curves")
    results = "Show the results of a run: rewards, evaluation, weights."
    add_run(add_command("results", results, "lachesis results @last"))
    report = add_command(
        "report",
        "Write a run's report: one self-contained HTML file, and its charts.",
        "lachesis report @last --to report",
    )
    add_run(report)
    report.add_argument("--to", metavar="DIR", help="a folder (default: the run's own, report/)")
    report.add_argument("--open", action="store_true", help="open the page in a browser")
    add_run(add_command("open", "Open the page of a run in a browser.", "lachesis open @last"))


def add_change_commands(add_command: AddCommand) -> None:
    """Add the commands that change, stop and remove runs."""
    edit = add_command(
        "edit",
        "Change the name, the note or the tags of a run.",
        "lachesis edit @last --note 'higher learning rate' --tag sweep",
    )
    add_run(edit)
    edit.add_argument("--name", help="a new name; an empty one removes it")
    edit.add_argument("--note", help="a new note; an empty one removes it")
    edit.add_argument("--tag", action="append", default=[], help="a tag to add; may be repeated")
    edit.add_argument("--untag", action="append", default=[], metavar="TAG", help="a tag to remove")
    stop = add_command("stop", "Stop a run; it saves a checkpoint first.", "lachesis stop @last")
    add_run(stop)
    stop.add_argument(
        "--now",
        action="store_true",
        help="stop without a checkpoint; also ends a stop that takes too long",
    )
    remove = add_command(
        "rm", "Remove ended runs with all their files, after a question.", "lachesis rm 1f3a 9c0b"
    )
    add_runs(remove, minimum=1)
    remove.add_argument("-y", "--yes", action="store_true", help="ask no question")


def add_used_model_commands(add_command: AddCommand) -> None:
    """Add the commands that use what was trained."""
    _add_weights(add_command)
    _add_answer_commands(add_command)


def _add_weights(add_command: AddCommand) -> None:
    weights = add_command(
        "weights",
        "Export a run's adapter for PEFT, and compare it with the trained model.",
        "lachesis weights @last --checkpoint best --to adapter",
    )
    add_run(weights)
    weights.add_argument("--to", required=True, metavar="DIR", help="a new or empty folder")
    weights.add_argument(
        "--checkpoint", default="last", metavar="best|last|STEP", help=CHECKPOINT_HELP
    )
    verification = weights.add_mutually_exclusive_group()
    verification.add_argument(
        "--merged",
        action="store_true",
        help="also export the merged model, in the subfolder merged/",
    )
    verification.add_argument(
        "--no-verify", action="store_true", help="do not load and compare the exported files"
    )
    weights.add_argument(
        "--push-to-hub",
        metavar="OWNER/NAME",
        help="also push the adapter, or with --merged the merged model, to this repository of the "
        "Hugging Face Hub, with a card; a new repository is private",
    )
    weights.add_argument(
        "--public", action="store_true", help="with --push-to-hub: make a new repository public"
    )


def _add_answer_commands(add_command: AddCommand) -> None:
    """Add the commands that talk to what was trained."""
    ask = add_command(
        "ask",
        "Ask the trained model a question.",
        "lachesis ask @last '3+4=' --checkpoint best",
    )
    add_run(ask)
    ask.add_argument("question", help="a text, or - to read the standard input")
    ask.add_argument(
        "-n", "--samples", type=GROUP_SIZE, default=1, help="answers (default: %(default)s)"
    )
    _add_answer_options(ask)
    chat = add_command("chat", "Talk to the trained model.", "lachesis chat @last")
    add_run(chat)
    _add_answer_options(chat)
    serve_model = add_command(
        "serve-model",
        "Serve the trained model as OpenAI's API does, until Ctrl-C.",
        "lachesis serve-model @last --port 8000",
    )
    add_run(serve_model)
    _add_served_checkpoint(serve_model)
    serve_model.add_argument("--port", type=PORT, default=8000, help="default: %(default)s")


def _add_served_checkpoint(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--checkpoint",
        default="last",
        metavar="best|last|STEP|base",
        help=f"{CHECKPOINT_HELP}, or base for the model before training",
    )


def _add_answer_options(command: argparse.ArgumentParser) -> None:
    _add_served_checkpoint(command)
    command.add_argument(
        "--max-tokens",
        type=NUM_TOKENS,
        default=256,
        help="tokens of an answer at most (default: %(default)s)",
    )
    command.add_argument(
        "--temperature",
        type=TEMPERATURE,
        default=0.0,
        help="0 for the most probable answer (default), 1 for samples as in training",
    )
    command.add_argument(
        "--raw", action="store_true", help="continue the text itself, without a chat template"
    )


def _add_runs(command: argparse.ArgumentParser) -> None:
    command.add_argument("--env", metavar="NAME", help="those on this environment")
    command.add_argument(
        "--status", metavar="WORD", help="those in this state, such as running or failed"
    )
    command.add_argument("--tag", help="those with this tag")
    command.add_argument(
        "--sort",
        choices=SORT_KEYS,
        default="created",
        help="the greatest first, by %(choices)s (default: %(default)s)",
    )
    command.add_argument(
        "-n", "--limit", type=NUM_RUNS, default=20, help="runs at most (default: %(default)s)"
    )


def _add_logs(logs: argparse.ArgumentParser) -> None:
    add_run(logs)
    logs.add_argument(
        "service",
        nargs="?",
        help="trainer, env, env-NAME, api, engine, evaluate_before or evaluate_after (default: the "
        "process that failed, else trainer)",
    )
    logs.add_argument(
        "-f", "--follow", action="store_true", help="follow the log until the run ends"
    )
    logs.add_argument(
        "-n", "--lines", type=NUM_LINES, default=50, help="lines to show (default: %(default)s)"
    )


def _add_rollouts(command: argparse.ArgumentParser) -> None:
    add_run(command)
    command.add_argument(
        "--step", metavar="N|last", help="those of one training step (default: of all steps)"
    )
    choice = command.add_mutually_exclusive_group()
    choice.add_argument(
        "--worst", type=NUM_ROLLOUTS, metavar="N", help="the N with the lowest scores"
    )
    choice.add_argument(
        "--best", type=NUM_ROLLOUTS, metavar="N", help="the N with the highest scores"
    )
    choice.add_argument(
        "--invalid",
        action="store_true",
        help="those that could not be scored or trained on, with the reason",
    )
    command.add_argument(
        "--item",
        metavar="KEY|TEXT",
        help="those of one item: its key, or a part of the prompt",
    )
    command.add_argument("-n", "--limit", type=NUM_ROLLOUTS, help="maximum number (default: 10)")
    command.add_argument(
        "--tokens", action="store_true", help="also the token ids and log-probabilities"
    )
