"""Words for what went wrong in an environment, and counts of them: one entry for each kind of
failure.

An exception is described as `ZeroDivisionError at countdown.py:41: division by zero`: its type, the
line of the environment's own code, and its message as an example. Failures of one type and line are
one kind, whatever their messages say. A reason without such a place, as environments write them, is
one kind with those that differ only in numbers, quotes and paths.
"""

from __future__ import annotations

import re
import sys
import sysconfig
import traceback
from collections.abc import Mapping
from pathlib import Path

from lachesis.base.secrets import redact

OTHERS = "others"
"""The entry that counts the kinds beyond the largest number of entries."""
MAX_REASON_LENGTH = 300
"""Characters of a reason."""
_LOCATED_REASON = re.compile(r".*?\b[A-Za-z_]\w* at [^:\n]*:\d+(?=:|$)")
_VARIABLE_PARTS = re.compile(
    r"""'[^']*'|"[^"]*"|(?:[A-Za-z]:)?(?:[/\\][^\s/\\:;,'"]+)+|\b\w*\d\w*(?:\.\d+)*"""
)
"""The parts in which two reasons of one kind may differ: quotes, paths, and words that hold a
digit.
"""
_LIBRARY_PREFIXES = tuple(
    f"{folder.resolve()}/"
    for folder in (
        *(
            Path(sysconfig.get_path(name))
            for name in ("stdlib", "platstdlib", "purelib", "platlib")
        ),
        Path(__file__).parents[1],
    )
)


def describe_exception(error: BaseException, environment_file: str | None = None) -> str:
    """Return the exception's type, its place in the environment's code, and its message, as `plain`
    text.

    Args:
        error: The exception. A group stands for its first exception, a retry that gave up for its
            last attempt's one.
        environment_file: The file that the environment is run from; this process's program by
            default.
    """
    location = _find_own_line(error, environment_file)
    cause = _unwrap(error)
    location = location or _find_own_line(cause, environment_file) or _find_innermost_line(cause)
    message = _get_message(cause)
    prefix = f"{type(cause).__name__} at {location}" if location else type(cause).__name__
    return sanitize_reason(f"{prefix}: {message}" if message else prefix)


def get_failure_kind(reason: str) -> str:
    """Return the part of a reason that all reasons of its kind share."""
    match = _LOCATED_REASON.match(reason)
    return match.group() if match else _VARIABLE_PARTS.sub("", reason)


def sanitize_reason(reason: str) -> str:
    """Return the reason as it is stored: on one line, in valid Unicode, without secrets, of bounded
    length.
    """
    # half an emoji could not be written as JSON
    encodable = reason.encode("utf-8", "replace").decode()
    return redact(" ".join(encodable.split()))[:MAX_REASON_LENGTH]


def count_reason(counts: dict[str, int], reason: str, *, max_kinds: int, times: int = 1) -> None:
    """Add to the entry of the reason's kind, or to `OTHERS` when there are `max_kinds` entries
    without it.

    The key of an entry is the first reason of its kind, which serves as the example.
    """
    kind = get_failure_kind(reason)
    entry = next((text for text in counts if get_failure_kind(text) == kind), None)
    if entry is None:
        is_full = sum(text != OTHERS for text in counts) >= max_kinds
        entry = OTHERS if is_full else reason
    counts[entry] = counts.get(entry, 0) + times


def merge_counts(total: dict[str, int], counts: Mapping[str, int]) -> None:
    """Add the counts of another process, kind by kind."""
    for reason, count in counts.items():
        count_reason(total, reason, max_kinds=len(total) + 1, times=count)


def _unwrap(error: BaseException) -> BaseException:
    for _ in range(5):
        # of tenacity, whose own message has no cause
        attempt = getattr(error, "last_attempt", None)
        if isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        elif attempt is not None and (cause := attempt.exception()) is not None:
            error = cause
        else:
            break
    return error


def _get_message(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as problem:  # the environment's own class
        return f"its message cannot be made: {type(problem).__name__}"


def _find_own_line(error: BaseException, environment_file: str | None) -> str | None:
    """Return the innermost line of the environment's file, else of code that belongs to no library."""
    lines = _list_frame_lines(error)
    file = str(Path(environment_file or sys.argv[0]).resolve())
    own_lines = [line for line in lines if line[0] == file] or [
        line for line in lines if not _is_library(line[0])
    ]
    return _format_location(*own_lines[-1]) if own_lines else None


def _find_innermost_line(error: BaseException) -> str | None:
    lines = _list_frame_lines(error)
    return _format_location(*lines[-1]) if lines else None


def _list_frame_lines(error: BaseException) -> list[tuple[str, int]]:
    frames = traceback.walk_tb(error.__traceback__)
    return [(str(Path(frame.f_code.co_filename).resolve()), line) for frame, line in frames]


def _is_library(file: str) -> bool:
    return (
        file.startswith(_LIBRARY_PREFIXES)
        or "site-packages" in file
        or Path(file).name.startswith("<")
    )


def _format_location(file: str, line: int) -> str:
    return f"{Path(file).name.replace(':', '_')}:{line}"
