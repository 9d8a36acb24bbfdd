"""Parse the arguments of the command `lachesis` and return its exit code.

The module `commands` runs the commands, and the modules `show_*` format their answers. Exit codes:
0 done, 1 an error (its code and reason on stderr; with --json as JSON on stdout), 2 wrong
arguments, 130 interrupted.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import warnings
from collections.abc import Callable

from lachesis import __version__
from lachesis.base.errors import LachesisError, StorageError
from lachesis.base.json_text import error_to_payload
from lachesis.base.number_types import GROUP_SIZE, NUM_GROUPS, NUM_LINES, NUM_STEPS, PORT, SEED
from lachesis.cli.metrics import add_metrics_options
from lachesis.cli.old_names import replace_old_command, show_warning
from lachesis.cli.rollouts import add_rollout_options
from lachesis.cli.schedules import add_schedule_commands

EPILOG = (
    "Start with `lachesis demo`, or with `lachesis serve` in one terminal and\n"
    "`lachesis train arithmetic --watch` in another. All files are kept under $LACHESIS_HOME."
)

MODEL_HELP = (
    "base model: a Hugging Face name, a folder or tiny (default: a tiny model that was pretrained "
    "on the environment)"
)
# Adds a command with its help text.
AddCommand = Callable[[str, str], argparse.ArgumentParser]


def build_parser() -> argparse.ArgumentParser:
    """Return the parser with every command and its options."""
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--json", action="store_true", help="print JSON for a program")
    top = argparse.ArgumentParser(
        prog="lachesis",
        description="Train language models with reinforcement learning: find environments, launch, "
        "watch and stop runs, export weights.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=f"lachesis {__version__}")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True)

    def add_command(name: str, text: str) -> argparse.ArgumentParser:
        return commands.add_parser(name, help=text, description=text, parents=[common])

    # The help lists the commands in this order, which is the order of their use.
    _add_first_commands(add_command)
    _add_start_commands(add_command)
    _add_run_commands(add_command)
    add_schedule_commands(add_command, _add_launch_options)
    _add_notification_options(
        add_command(
            "notifications",
            "Call a webhook from the Prefect server when a run fails, stalls or finishes.",
        )
    )
    _add_servers(add_command)
    _add_doctor(add_command)
    return top


def _add_doctor(add_command: AddCommand) -> None:
    doctor = add_command(
        "doctor",
        "Check this machine, say how to get what is missing, and find leftovers of dead runs.",
    )
    doctor.add_argument(
        "--fix",
        action="store_true",
        help="clean up after dead runs: processes, files, Tinker sessions",
    )


def _add_first_commands(add_command: AddCommand) -> None:
    """Add what a user needs before the first run."""
    demo = add_command(
        "demo", "Build a tiny model, train it on sums, and compare it before and after."
    )
    demo.add_argument("--seed", type=SEED, default=0)
    demo.add_argument("--steps", type=NUM_STEPS, help="training steps (default: the profile's)")
    serve = add_command("serve", "Start the Prefect server and the runner here; Ctrl-C ends both.")
    serve.add_argument(
        "--port", type=PORT, help="port of the Prefect server (default: 4200, or a free one)"
    )
    _add_model(add_command("model", "Build a tiny model that learns on a laptop."))
    _add_env(add_command("env", "Create an environment of your own, or check one."))
    envs = add_command("envs", "List environments; with a name, show its fields.")
    envs.add_argument("name", nargs="?")
    _add_profile_option(envs)


def _add_start_commands(add_command: AddCommand) -> None:
    """Add the commands that start a run or a test, and the list of runs."""
    _add_train(add_command("train", "Start a run on an environment."))
    _add_resume(
        add_command(
            "resume",
            "Resume an ended run from its newest checkpoint, or from the beginning if it has none.",
        )
    )
    _add_test(
        add_command(
            "test", "Test an environment before training: let models answer a few of its items."
        )
    )
    add_command("runs", "List all runs.")


def _add_run_commands(add_command: AddCommand) -> None:
    """Add the commands that act on one run."""
    for name, text in (
        ("status", "Show one run: phase, processes, metrics."),
        ("results", "Show the results of a run: rewards, evaluation, weights."),
    ):
        add_command(name, text).add_argument("run")
    add_metrics_options(add_command("metrics", "Show the metrics of a run, step by step."))
    add_rollout_options(add_command("rollouts", "Show what the model answered, and the scores."))
    stop = add_command("stop", "Stop a run; it saves a checkpoint first.")
    stop.add_argument("run")
    stop.add_argument(
        "--now",
        action="store_true",
        help="stop without a checkpoint; also ends a stop that takes too long",
    )
    _add_logs(add_command("logs", "Show the log of one process of a run."))
    _add_weights(
        add_command(
            "weights", "Export a run's adapter for PEFT, and compare it with the trained model."
        )
    )
    report = add_command(
        "report", "Write a run's report: one self-contained HTML file, and its charts."
    )
    report.add_argument("run")
    report.add_argument("--to", metavar="DIR", help="a folder (default: the run's own, report/)")


def _add_logs(logs: argparse.ArgumentParser) -> None:
    logs.add_argument("run")
    logs.add_argument(
        "service",
        nargs="?",
        help="trainer, env, env-NAME, api, engine, evaluate_before or evaluate_after (default: the "
        "process that failed, else trainer)",
    )
    logs.add_argument(
        "-f", "--follow", action="store_true", help="follow the log until the run ends"
    )
    logs.add_argument("-n", "--lines", type=NUM_LINES, default=50)


def _add_weights(weights: argparse.ArgumentParser) -> None:
    weights.add_argument("run")
    weights.add_argument("--to", required=True, metavar="DIR", help="a new or empty folder")
    checkpoint_help = "last (default), best (by held-out result, else by mean reward), or a step"
    weights.add_argument(
        "--checkpoint", default="last", metavar="best|last|STEP", help=checkpoint_help
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


def _add_model(command: argparse.ArgumentParser) -> None:
    command.add_argument("action", choices=["build"])
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
    _add_edit_options(command)


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
    _add_edit_options(check)
    install = actions.add_parser(
        "install",
        help="install the requirements in the file's header (PEP 723) in a folder of their own",
    )
    install.add_argument("environment", help="a file, or a name from `lachesis envs`")
    for action in (new, check, install):
        action.add_argument("--json", action="store_true", help="print JSON for a program")


def _add_profile_option(command: argparse.ArgumentParser) -> None:
    default = os.environ.get("LACHESIS_PROFILE", "embedded")
    command.add_argument(
        "--profile", default=default, help="embedded, tinker or custom (default: %(default)s)"
    )


def _add_train(command: argparse.ArgumentParser) -> None:
    command.add_argument("environment", help="a name from `lachesis envs`, or a file")
    command.add_argument(
        "--with",
        action="append",
        default=[],
        metavar="ENVIRONMENT[=WEIGHT]",
        dest="others",
        help="another environment for the same run, with its weight relative to the first one's 1; "
        "may be repeated",
    )
    _add_launch_options(command)
    command.add_argument(
        "--from",
        metavar="RUN[@STEP|@best]",
        dest="start_from",
        help="start with the weights of that checkpoint",
    )
    _add_watch_option(command)


def _add_launch_options(command: argparse.ArgumentParser) -> None:
    _add_edit_options(command)
    _add_profile_option(command)
    command.add_argument(
        "--steps", type=NUM_STEPS, help="training steps (default: the profile's number)"
    )
    command.add_argument("--model", help=MODEL_HELP)
    command.add_argument("--name", help="a name for the run, which lists and its page show")
    command.add_argument("--seed", type=SEED)
    command.add_argument(
        "--require-validation",
        action="store_true",
        help="refuse unless a recent `lachesis test` found the environment learnable",
    )


def _add_resume(command: argparse.ArgumentParser) -> None:
    command.add_argument("run", help="the run; one that has not ended is returned unchanged")
    _add_edit_options(command, "limits.FIELD=VALUE")
    _add_watch_option(command)


def _add_edit_options(command: argparse.ArgumentParser, metavar: str = "FIELD=VALUE") -> None:
    command.add_argument(
        "--set", action="append", default=[], metavar=metavar, dest="edits", help="may be repeated"
    )


def _add_watch_option(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--watch",
        action="store_true",
        help="show progress until the run ends; Ctrl-C leaves it running",
    )


def _add_notification_options(command: argparse.ArgumentParser) -> None:
    action = command.add_mutually_exclusive_group(required=True)
    action.add_argument("--webhook", metavar="URL", help="URL to call; a second call replaces it")
    action.add_argument("--remove", action="store_true", help="call no web address any more")


def _add_servers(add_command: AddCommand) -> None:
    mcp = add_command("mcp", "Serve the tools to an agent by the Model Context Protocol.")
    mcp.add_argument(
        "--http", action="store_true", help="streamable HTTP instead of stdin and stdout"
    )
    mcp.add_argument(
        "--session",
        help="name of this agent's session (default: $LACHESIS_SESSION, or one per working folder)",
    )
    _add_listening(mcp, port=8090)
    api = add_command("api", "Serve the tools as plain HTTP routes, with a page at /docs.")
    api.add_argument(
        "--open",
        action="store_true",
        help="require no token, for clients that cannot send one; on loopback only",
    )
    _add_listening(api, port=8080)


def _add_listening(command: argparse.ArgumentParser, port: int) -> None:
    command.add_argument("--host", help="address to listen on (default: 127.0.0.1)")
    command.add_argument("--port", type=PORT, help=f"default: {port}")
    command.add_argument(
        "--allow-host",
        action="append",
        metavar="NAME",
        help="an additional host name of this server; may be repeated",
    )
    command.set_defaults(default_port=port)


def _add_test(command: argparse.ArgumentParser) -> None:
    command.add_argument("environment", help="a name from `lachesis envs`, or a file")
    model_help = (
        "on the embedded profile as for `train`: a Hugging Face name, a folder or tiny; else a "
        "folder, or a name at the endpoint"
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
    command.add_argument(
        "--prompt",
        action="append",
        help="a prompt of your own, instead of the environment's items; may be repeated",
    )
    command.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="FIELD=VALUE",
        dest="edits",
        help="may be repeated",
    )
    _add_profile_option(command)


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code."""
    warnings.showwarning = show_warning
    args = build_parser().parse_args(replace_old_command(sys.argv[1:] if argv is None else argv))
    os.umask(0o077)  # prompts, answers and weights are readable by their owner only
    from lachesis.cli import commands

    signal.signal(
        signal.SIGTERM, _raise_interrupt
    )  # lets `demo` end the processes that it has started
    try:
        return commands.run_command(args)
    except LachesisError as error:
        return _print_error(error, as_json=args.json)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        return _print_error(
            StorageError(f"{error.filename or 'a file'}: {error.strerror or error}"),
            as_json=args.json,
        )


def _print_error(error: LachesisError, *, as_json: bool) -> int:
    if as_json:
        print(json.dumps(error_to_payload(error), indent=2, default=str))
    else:
        print(f"{error.code}: {error}", file=sys.stderr)
    return 1


def _raise_interrupt(*_: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
