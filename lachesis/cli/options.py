"""Annotate the arguments and options that several commands share.

The annotations are no strings here: cyclopts reads them from modules that inherit the classes.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar, dataclass_transform

from cyclopts import Parameter, Token

from lachesis.base.argparse_types import NUM_STEPS, SEED
from lachesis.config.installation_settings import get_default_profile

T = TypeVar("T")
DEFAULT_PROFILE = get_default_profile()
MODEL_HELP = (
    "base model: a Hugging Face name, a folder or tiny (default: a tiny model that was pretrained "
    "on the environment)"
)
CHECKPOINT_HELP = "last (default), best (by held-out result, else by mean reward), or a step"


def number(
    read: Callable[[str], Any],
    text: str,
    *names: str,
    default: object = None,
    metavar: str | None = None,
) -> Parameter:
    """Return the parameter of an option that takes a number within bounds.

    Args:
        read: Reads the number, and refuses one that is out of its bounds.
        text: What the help says.
        names: Its names; by default that of the variable.
        default: The value without the option, for the help.
        metavar: The word that stands for the value in the help; by default its name.
    """

    def convert(type_: Any, tokens: Sequence[Token]) -> Any:
        try:
            return read(tokens[0].value)
        except argparse.ArgumentTypeError as error:
            raise ValueError(str(error)) from None

    shown = text if default is None else f"{text} (default: {default})"
    return Parameter(
        names or None, help=shown, converter=convert, allow_leading_hyphen=True, metavar=metavar
    )


def _resolve_run(type_: Any, tokens: Sequence[Token]) -> str:
    return _resolve_runs(type_, tokens)[0]


def _resolve_runs(type_: Any, tokens: Sequence[Token]) -> tuple[str, ...]:
    """Return the ids of the runs that the words mean, each once."""
    from lachesis.runs.names_and_tags import resolve_run_id
    from lachesis.runs.store import RunStore

    store = RunStore()
    return tuple(dict.fromkeys(resolve_run_id(store, token.value) for token in tokens))


def _resolve_checkpoint(type_: Any, tokens: Sequence[Token]) -> str:
    from lachesis.runs.names_and_tags import resolve_checkpoint_name
    from lachesis.runs.store import RunStore

    return resolve_checkpoint_name(RunStore(), tokens[0].value)


RUN_HELP = (
    "the run: its id or the first characters of it, its name (the newest run with that name), or "
    "@last"
)
Run = Annotated[str, Parameter(help=RUN_HELP, converter=_resolve_run)]
Runs = Annotated[tuple[str, ...], Parameter("RUN", help=RUN_HELP, converter=_resolve_runs)]
LikeRun = Annotated[str | None, Parameter(converter=_resolve_run)]
StartFrom = Annotated[
    str | None,
    Parameter(
        "--from",
        metavar="RUN[@STEP|@best]",
        converter=_resolve_checkpoint,
        help="start with the weights of that checkpoint",
    ),
]
EnvironmentName = Annotated[str, Parameter(help="a name from `lachesis env list`, or a file")]
Profile = Annotated[str, Parameter(help=f"embedded, tinker or custom (default: {DEFAULT_PROFILE})")]
Edits = Annotated[
    tuple[str, ...],
    Parameter(
        "--set",
        metavar="FIELD=VALUE",
        help="a field of `lachesis env show` and its value; may be repeated",
        allow_leading_hyphen=True,
    ),
]


@dataclass_transform(frozen_default=True, kw_only_default=True)
def options_class(cls: type[T]) -> type[T]:
    """Make a class whose fields are options; a command has those of its parameter `options`."""
    return Parameter(name="*")(dataclass(frozen=True, kw_only=True)(cls))


@options_class
class Output:
    """How an answer is printed."""

    json: Annotated[bool, Parameter(help="print JSON for a program")] = False


@options_class
class ServeOptions(Output):
    """Options of commands that need the Prefect server."""

    no_serve: Annotated[
        bool,
        Parameter(
            help="fail if no Prefect server runs here, instead of starting one in the background; "
            "also $LACHESIS_NO_SERVE=1"
        ),
    ] = False


@options_class
class FollowOptions(ServeOptions):
    """Options of commands that start a run."""

    watch: Annotated[
        bool, Parameter(help="show progress until the run ends; Ctrl-C leaves it running")
    ] = False


@options_class
class LaunchOptions:
    """Options that define the environment, the model and the settings of a training."""

    like: Annotated[
        LikeRun,
        Parameter(metavar="RUN", help="begin with the environment, model and settings of that run"),
    ] = None
    edits: Edits = ()
    profile: Annotated[
        str | None,
        Parameter(
            help="embedded, tinker or custom (default: that of --like or of the file, else "
            f"{DEFAULT_PROFILE})"
        ),
    ] = None
    steps: Annotated[
        int | None, number(NUM_STEPS, "training steps (default: the profile's number)")
    ] = None
    model: Annotated[str | None, Parameter(help=MODEL_HELP)] = None
    name: Annotated[
        str | None, Parameter(help="a name for the run, which lists and its page show")
    ] = None
    note: Annotated[str | None, Parameter(help="what you want to remember about the run")] = None
    tag: Annotated[
        tuple[str, ...], Parameter(help="a word to find the run by; may be repeated")
    ] = ()
    seed: Annotated[
        int | None, number(SEED, "seed of the adapter and, on the embedded profile, of sampling")
    ] = None
    require_validation: Annotated[
        bool,
        Parameter(
            help="refuse unless a recent `lachesis test` found the environment learnable (the "
            "default on paid profiles)"
        ),
    ] = False
    without_validation: Annotated[
        bool, Parameter(help="on a paid profile, do not require such a test")
    ] = False
