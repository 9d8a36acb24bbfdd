"""Describe failures of environments in one line each, and count them by kind.

An exception is described as `ZeroDivisionError at countdown.py:41: division by zero`: its type, the
line of the environment's own code, and its message. Failures of the same type at the same line are
one kind, whatever their messages say. Reasons without such a place, as environments write them, are
one kind when they differ only in numbers, quoted text and paths.
"""

import re
import sys
import sysconfig
import traceback
from collections.abc import Mapping
from pathlib import Path

from lachesis.base.secrets import redact

# The entry that counts all further kinds once the number of entries has reached its limit.
OTHERS = "others"
# The maximum length of a reason in characters.
MAX_REASON_LENGTH = 300
_LOCATED_REASON = re.compile(r".*?\b[A-Za-z_]\w* at [^:\n]*:\d+(?=:|$)")
# The parts in which two reasons of one kind may differ: quotes, paths, and words that hold a digit.
_VARIABLE_PARTS = re.compile(
    r"""'[^']*'|"[^"]*"|(?:[A-Za-z]:)?(?:[/\\][^\s/\\:;,'"]+)+|\b\w*\d\w*(?:\.\d+)*"""
)
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
    """Return the type of an exception, its place in the environment's code, and its message on one
    line.

    Args:
        error: The exception. For an exception group its first exception is described; for a retry
            that gave up, the exception of its last attempt.
        environment_file: The file that the environment runs from; by default the program of this
            process.
    """
    location = _find_own_line(error, environment_file)
    cause = _unwrap(error)
    location = location or _find_own_line(cause, environment_file) or _find_innermost_line(cause)
    message = _get_message(cause)
    if location:
        prefix = f"{type(cause).__name__} at {location}"
    else:
        prefix = type(cause).__name__
    return sanitize_reason(f"{prefix}: {message}" if message else prefix)


def get_failure_kind(reason: str) -> str:
    """Return the part of a reason that is the same for all reasons of its kind."""
    match = _LOCATED_REASON.match(reason)
    if match:
        return match.group()
    return _VARIABLE_PARTS.sub("", reason)


def sanitize_reason(reason: str) -> str:
    """Return the reason on one line, without secrets, cut to `MAX_REASON_LENGTH`."""
    # Half of a surrogate pair (half an emoji) could not be written as JSON.
    encodable = reason.encode("utf-8", "replace").decode()
    return redact(" ".join(encodable.split()))[:MAX_REASON_LENGTH]


def count_reason(counts: dict[str, int], reason: str, *, max_kinds: int, times: int = 1) -> None:
    """Add to the count of the reason's kind, or to `OTHERS` when there are `max_kinds` other
    entries.

    The key of an entry is the first reason of its kind, which serves as an example.
    """
    kind = get_failure_kind(reason)
    entry = next((text for text in counts if get_failure_kind(text) == kind), None)
    if entry is None:
        is_full = sum(text != OTHERS for text in counts) >= max_kinds
        entry = OTHERS if is_full else reason
    counts[entry] = counts.get(entry, 0) + times


def merge_counts(total: dict[str, int], counts: Mapping[str, int]) -> None:
    """Add the counts of another process to `total`, kind by kind."""
    for reason, count in counts.items():
        count_reason(total, reason, max_kinds=len(total) + 1, times=count)


def _unwrap(error: BaseException) -> BaseException:
    """Return the error inside of groups and of errors of retries."""
    for _ in range(5):
        # A RetryError of tenacity does not name its cause in its message.
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
    except Exception as problem:  # The class may be the environment's own and fail in __str__.
        return f"the message of the exception raised {type(problem).__name__}"


def _find_own_line(error: BaseException, environment_file: str | None) -> str | None:
    """Return the innermost line in the environment's file, else outside of libraries."""
    lines = _list_frame_lines(error)
    file = str(Path(environment_file or sys.argv[0]).resolve())
    own_lines = [line for line in lines if line[0] == file] or [
        line for line in lines if not _is_library(line[0])
    ]
    if own_lines:
        return _format_location(*own_lines[-1])
    return None


def _find_innermost_line(error: BaseException) -> str | None:
    lines = _list_frame_lines(error)
    if lines:
        return _format_location(*lines[-1])
    return None


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


def list_causes(error: BaseException | None) -> list[BaseException]:
    """Return an error and the errors that caused it, at most five.

    The error of a retry that gave up does not name its cause, so the last attempt is looked up.
    """
    causes: list[BaseException] = []
    while error is not None and len(causes) < 5:
        causes.append(error)
        attempt = getattr(error, "last_attempt", None)
        error = attempt.exception() if attempt is not None else error.__cause__
    return causes


def is_endpoint_error(error: BaseException) -> bool:
    """Return whether the endpoint of the model is at fault, and not the environment."""
    return any(
        type(cause).__module__.split(".")[0] in ("openai", "httpx", "httpcore", "aiohttp")
        for cause in list_causes(error)
    )


def is_transport_error(error: BaseException) -> bool:
    """Return whether a retry may help: no connection, timeout, truncated, HTTP 429 or 5xx."""
    for cause in list_causes(error):
        status = getattr(cause, "status_code", None) or getattr(cause, "status", None)
        if isinstance(status, int):
            return status == 429 or status >= 500
        if type(cause).__name__ in ("APIConnectionError", "APITimeoutError"):
            return True
    return is_endpoint_error(error)


def is_unanswered(error: BaseException) -> bool:
    """Return whether a request failed because no answer came, and not because of its content."""
    builtin_errors = (TimeoutError, ConnectionError)  # aiohttp raises these.
    return is_transport_error(error) or any(
        isinstance(cause, builtin_errors) for cause in list_causes(error)
    )
