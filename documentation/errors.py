"""Describe every error with its code, from the classes."""

from __future__ import annotations

import builtins

from documentation.markdown import make_table, take_first_sentence
from lachesis.base.errors import LachesisError, RunError

ERRORS_HEAD = """# Errors

For whoever writes a program that calls Lachesis: the codes to match on.

A command with `--json`, a tool and a route answer an error as `{"error": MESSAGE, "code": CODE}`,
some with further keys such as `available`. Errors that no program would tell apart have one code.
The message says what happened, the value, what is
allowed and the next step; it may be worded better in a later release, and the code stays.
[Troubleshooting](../troubleshooting.md) says for each code why it comes and what to do. From
Python, `LachesisError` catches all of them; some are also an error of Python, which the last column
names.
"""


def list_error_classes() -> list[type[LachesisError]]:
    """Return all errors, each after the one that it is a kind of, without those that are never
    raised themselves.
    """

    def walk(error: type[LachesisError]) -> list[type[LachesisError]]:
        return [error, *(kind for child in error.__subclasses__() for kind in walk(child))]

    own = [error for error in walk(LachesisError) if error.__module__.startswith("lachesis.base")]
    return [error for error in own if error is not RunError]


def render_errors() -> str:
    """Return the page of all errors as one table."""
    rows = [
        (
            f"[`{error.code}`](../troubleshooting.md#{error.code})",
            take_first_sentence(error.__doc__),
            f"`{error.__name__}`",
            ", ".join(f"`{name}`" for name in _list_python_names(error)),
        )
        for error in list_error_classes()
    ]
    table = make_table(("code", "what happened", "class", "also"), rows)
    return f"{ERRORS_HEAD}\n{table}\n"


def _list_python_names(error: type[LachesisError]) -> list[str]:
    """Return the errors of Python that this one is too, without those that all are."""
    names = [base.__name__ for base in error.__bases__ if base.__module__ == builtins.__name__]
    return [name for name in names if name != "Exception"]
