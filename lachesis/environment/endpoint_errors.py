"""Whose fault it is that a request for samples failed."""

from __future__ import annotations


def list_causes(error: BaseException | None) -> list[BaseException]:
    """The error and what lies behind it, at most five. A retry that has given up says nothing of what went wrong."""
    found: list[BaseException] = []
    while error is not None and len(found) < 5:
        found.append(error)
        attempt = getattr(error, "last_attempt", None)
        error = attempt.exception() if attempt is not None else error.__cause__
    return found


def is_endpoint_error(error: BaseException) -> bool:
    """Whether the model's endpoint is at fault, and not the environment."""
    return any(type(one).__module__.split(".")[0] in ("openai", "httpx", "httpcore", "aiohttp") for one in list_causes(error))


def is_transport_error(error: BaseException) -> bool:
    """Whether asking again may help: no connection, a time-out, an answer cut in the middle, HTTP 429 or 5xx."""
    for one in list_causes(error):
        status = getattr(one, "status_code", None) or getattr(one, "status", None)
        if isinstance(status, int):
            return status == 429 or status >= 500
        if type(one).__name__ in ("APIConnectionError", "APITimeoutError"):
            return True
    return is_endpoint_error(error)


def is_lost(error: BaseException) -> bool:
    """Return whether a request failed because no answer came, and not because of what it asks."""
    own = (TimeoutError, ConnectionError)  # of Python itself, as aiohttp raises them
    return is_transport_error(error) or any(isinstance(one, own) for one in list_causes(error))
