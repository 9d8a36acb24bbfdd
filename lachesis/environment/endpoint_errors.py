"""Tell whether a failed request for samples was the fault of the endpoint or of the environment."""

from __future__ import annotations


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
    """Return whether a retry may help: no connection, a timeout, a truncated response, HTTP 429 or
    5xx.
    """
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
