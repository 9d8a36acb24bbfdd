"""Declare the arguments of the commands that come before a run, and of those that start one."""

from __future__ import annotations

import argparse

from lachesis.base.argparse_types import (
    GROUP_SIZE,
    LORA_RANK,
    NUM_GROUPS,
    NUM_STEPS,
    NUM_TOKENS,
    PORT,
    SEED,
)
from lachesis.cli.options.common import (
    DEFAULT_PROFILE,
    ENVIRONMENT_HELP,
    AddCommand,
    add_edit_options,
    add_launch_options,
    add_profile_option,
    add_serve_option,
    add_watch_option,
    add_yes_option,
)


def add_first_commands(add_command: AddCommand) -> None:
    """Add what a user needs before the first run."""
    demo = add_command(
        "demo",
        "Train a tiny model on sums, and compare it before and after.",
        "lachesis demo --steps 20",
    )
    demo.add_argument("--seed", type=SEED, default=0, help="default: %(default)s")
    demo.add_argument("--steps", type=NUM_STEPS, help="training steps (default: the profile's)")
    _add_serve(add_command)
    doctor = add_command(
        "doctor",
        "Check this machine, say how to get what is missing, and find leftovers of dead runs.",
        "lachesis doctor --fix",
    )
    doctor.add_argument(
        "--fix",
        action="store_true",
        help="clean up after dead runs: processes, files, Tinker sessions",
    )
    _add_completion(add_command)


def _add_completion(add_command: AddCommand) -> None:
    completion = add_command(
        "completion",
        "Print the code with which a shell completes commands, runs, environments and fields.",
        'eval "$(lachesis completion bash)"',
    )
    completion.add_argument(
        "shell", choices=["bash", "zsh", "fish"], help="the shell that reads the code"
    )


def _add_serve(add_command: AddCommand) -> None:
    serve = add_command(
        "serve",
        "Start the Prefect server and the runner here; Ctrl-C ends both.",
        "lachesis serve",
    )
    serve.add_argument(
        "--port", type=PORT, help="port of the Prefect server (default: 4200, or a free one)"
    )
    serve.add_argument(
        "--stop",
        action="store_true",
        help="end the server and the runner, also those that `lachesis train` has started",
    )


def add_environment_commands(add_command: AddCommand) -> None:
    """Add the commands about environments and models."""
    envs = add_command(
        "envs", "List environments; with a name, show its fields.", "lachesis envs arithmetic"
    )
    envs.add_argument("name", nargs="?", help="a name from the list, or a file")
    envs.add_argument(
        "--all", action="store_true", help="show all fields, also those that are locked"
    )
    add_profile_option(envs)
    _add_env(
        add_command(
            "env", "Create an environment of your own, or check one.", "lachesis env new my_task"
        )
    )
    _add_test(
        add_command(
            "test",
            "Test an environment before training: let models answer a few of its items.",
            "lachesis test arithmetic --steps 3",
        )
    )
    models = add_command(
        "models",
        "List the models that can be trained, as the profile's server offers them now.",
        "lachesis models --profile tinker",
    )
    models.add_argument("name", nargs="?", help="one of them, for all that is known about it")
    add_profile_option(models)
    _add_backend(
        add_command(
            "backend",
            "Find out whether the trainer can use a server that speaks Tinker.",
            "lachesis backend check http://127.0.0.1:8000",
        )
    )
    _add_model(
        add_command(
            "model",
            "Build a tiny model that learns on a laptop, or forecast the memory of any model.",
            "lachesis model build --for arithmetic",
        )
    )


def add_start_commands(add_command: AddCommand) -> None:
    """Add the commands that start a run."""
    _add_train(
        add_command(
            "train",
            "Start a run on an environment.",
            "lachesis train arithmetic --set learning_rate=0.001 --watch",
        )
    )
    _add_config(
        add_command(
            "config",
            "Write a launch file: every field with its meaning, its default and what is allowed.",
            "lachesis config arithmetic > RUN.yaml",
        )
    )
    _add_resume(
        add_command(
            "resume",
            "Resume an ended run from its newest checkpoint, or from the beginning if it has none; "
            "a completed one with more steps.",
            "lachesis resume @last --set total_steps=200 --watch",
        )
    )


def _add_env(command: argparse.ArgumentParser) -> None:
    actions = command.add_subparsers(dest="action", metavar="ACTION", required=True)
    new = actions.add_parser("new", help="create a working file, for you to change")
    new.add_argument("name", help="lower-case letters, digits and _")
    new.add_argument("--to", metavar="DIR", default=".", help="default: this folder")
    check = actions.add_parser(
        "check",
        help="check everything that needs no training, in half a minute and without a server",
    )
    check.add_argument("environment", help="a file, or a name from `lachesis envs`")
    check.add_argument("--model", help="folder of the model (default: the tiny model)")
    add_edit_options(check)
    install = actions.add_parser(
        "install",
        help="install the requirements in the file's header (PEP 723) in a folder of their own",
    )
    install.add_argument("environment", help="a file, or a name from `lachesis envs`")
    for action in (new, check, install):
        action.add_argument("--json", action="store_true", help="print JSON for a program")


def _add_prompt_options(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--prompt",
        action="append",
        help="a prompt of your own, instead of the environment's items; may be repeated",
    )
    command.add_argument(
        "--show-prompt",
        action="store_true",
        help="show what the model is shown of the first item, as text and as token ids; sample "
        "nothing",
    )


def _add_backend(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "action",
        choices=["check", "install"],
        help="check: ask a server what it means by each request; install: make the environment of "
        "an engine that a run can start",
    )
    command.add_argument(
        "target",
        nargs="?",
        metavar="URL|NAME",
        help="check: its address (default: that of TINKER_BASE_URL); install: skyrl",
    )
    command.add_argument(
        "--model", help="check: a model that it trains (default: the first one that it offers)"
    )
    command.add_argument("--python", help="install: the interpreter (default: one that is found)")


def _add_model(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "action",
        choices=["build", "memory"],
        help="build: make a model; memory: forecast what a model needs",
    )
    command.add_argument("name", nargs="?", help="memory: the model, a folder or a Hub name")
    command.add_argument(
        "--rank", type=LORA_RANK, default=32, help="memory: rank of its adapter (default: 32)"
    )
    command.add_argument(
        "--tokens",
        type=NUM_TOKENS,
        default=4096,
        help="memory: length of the longest sequence (default: 4096)",
    )
    command.add_argument(
        "--precision",
        choices=["auto", "float32", "bfloat16"],
        default="auto",
        help="memory: type of its weights (default: auto)",
    )
    command.add_argument(
        "--base-weights",
        choices=["full", "8bit", "4bit"],
        default="full",
        help="memory: whether they are stored in fewer bits (default: full)",
    )
    command.add_argument(
        "--gib", type=float, help="memory: that of a card that is not here (default: what is free)"
    )
    for_help = "environment whose examples to pretrain on, instead of sums; may be repeated"
    command.add_argument(
        "--for",
        action="append",
        default=[],
        metavar="ENVIRONMENT",
        dest="environments",
        help=for_help,
    )
    command.add_argument(
        "--share",
        type=float,
        default=0.3,
        help="share of those examples that are correct (default: %(default)s)",
    )
    command.add_argument(
        "--steps", type=NUM_STEPS, default=900, help="pretraining steps (default: %(default)s)"
    )
    add_edit_options(command)


def _add_train(command: argparse.ArgumentParser) -> None:
    command.add_argument("environment", nargs="?", help=ENVIRONMENT_HELP)
    command.add_argument(
        "--like", metavar="RUN", help="begin with the environment, model and settings of that run"
    )
    command.add_argument(
        "--with",
        action="append",
        default=[],
        metavar="ENVIRONMENT[=WEIGHT]",
        dest="others",
        help="another environment for the same run, with its weight relative to the first one's 1; "
        "may be repeated",
    )
    add_launch_options(command, f"that of --like or of the file, else {DEFAULT_PROFILE}")
    command.add_argument(
        "--from",
        metavar="RUN[@STEP|@best]",
        dest="start_from",
        help="start with the weights of that checkpoint",
    )
    command.add_argument(
        "--dry-run",
        action="store_true",
        help="show the configuration, the processes and the forecast; start nothing",
    )
    add_yes_option(command)
    add_serve_option(command)
    add_watch_option(command)


def _add_config(command: argparse.ArgumentParser) -> None:
    command.add_argument("environment", nargs="?", help="a name from `lachesis envs`, or a file")
    command.add_argument("--like", metavar="RUN", help="write the settings of that run")
    command.add_argument(
        "--schema",
        action="store_true",
        help="write the JSON schema of launch files instead, for editors",
    )
    add_launch_options(command, f"that of --like, else {DEFAULT_PROFILE}")


def _add_resume(command: argparse.ArgumentParser) -> None:
    command.add_argument("run", help="the run; one that has not ended is returned unchanged")
    add_edit_options(command, "total_steps=N|limits.FIELD=VALUE")
    add_serve_option(command)
    add_watch_option(command)


def _add_test(command: argparse.ArgumentParser) -> None:
    command.add_argument("environment", help="a name from `lachesis envs`, or a file")
    model_help = (
        "as for `train`: a Hugging Face name, a folder or tiny; on profiles tinker and custom a "
        "name from `lachesis models`"
    )
    command.add_argument("--model", action="append", help=f"{model_help}; may be repeated")
    endpoint_help = "a name at $OPENAI_BASE_URL, or at OpenRouter; may be repeated"
    command.add_argument("--endpoint-model", action="append", metavar="NAME", help=endpoint_help)
    command.add_argument(
        "--steps", type=NUM_GROUPS, default=3, help="groups per model (default: %(default)s)"
    )
    command.add_argument(
        "--group-size",
        type=GROUP_SIZE,
        default=16,
        help="completions per item (default: %(default)s)",
    )
    _add_prompt_options(command)
    add_edit_options(command)
    add_profile_option(command)
    add_serve_option(command)
