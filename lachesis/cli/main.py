"""Run the command `lachesis`: parse its words, run one command, and return the exit code.

`parser` reads the words, `commands` finds the function that runs a command, and the modules
`show_*` format answers. Exit codes: 0 done, 1 an error (its code and reason on stderr; with --json
as JSON on stdout), 2 wrong arguments, 130 interrupted.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Sequence

from lachesis.base.errors import ArgumentsError, LachesisError, StorageError
from lachesis.cli.options.runs import (
    add_change_commands,
    add_used_model_commands,
    add_view_commands,
)
from lachesis.cli.options.servers import add_server_commands
from lachesis.cli.options.start import (
    add_environment_commands,
    add_first_commands,
    add_start_commands,
)
from lachesis.cli.parser import TopParser, UsageError
from lachesis.models.transformers_import import leave_out_bitsandbytes

# The help lists the commands in these groups, in the order of their use.
GROUPS = {
    "first steps": add_first_commands,
    "environments and models": add_environment_commands,
    "start runs": add_start_commands,
    "look at runs": add_view_commands,
    "change runs": add_change_commands,
    "use what was trained": add_used_model_commands,
    "serve agents": add_server_commands,
}


def build_parser() -> TopParser:
    """Return the parser with every command and its options."""
    parser = TopParser()
    for title, add_commands in GROUPS.items():
        parser.add_group(title)
        add_commands(parser.add_command)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    if argv is None:  # The process ends with this command.
        leave_out_bitsandbytes()
    words = list(sys.argv[1:] if argv is None else argv)
    parser = build_parser()
    # A shell asks for words to complete by this variable.
    if "_ARGCOMPLETE" in os.environ:
        from lachesis.cli.completion import complete_words

        complete_words(parser)
    try:
        args = parser.parse_command_line(words)
    except UsageError as error:
        _print_usage_error(error, as_json="--json" in words)
        raise SystemExit(2) from None
    os.umask(0o077)  # prompts, answers and weights are readable by their owner only
    from lachesis.cli.commands import run_command

    signal.signal(
        signal.SIGTERM, _raise_interrupt
    )  # lets `demo` end the processes that it has started
    try:
        return run_command(args)
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


def _print_usage_error(error: UsageError, *, as_json: bool) -> None:
    if as_json:
        from lachesis.base.json_text import error_to_payload

        print(json.dumps(error_to_payload(ArgumentsError(str(error))), indent=2))
    else:
        print(f"{error}\n{error.usage}", end="", file=sys.stderr)


def _print_error(error: LachesisError, *, as_json: bool) -> int:
    if as_json:
        from lachesis.base.json_text import error_to_payload

        print(json.dumps(error_to_payload(error), indent=2, default=str))
    else:
        from lachesis.cli import console

        console.print_sentence(f"{error.code}: {error}", console.stderr_console)
    return 1


def _raise_interrupt(*_: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
