"""Listen to what the Tinker SDK tells its own telemetry, for which it has no public function.

The SDK waits out errors by itself: it repeats a request after HTTP 429, 5xx and lost connections,
and pauses for an hour when an account cannot pay. Nothing of that reaches its caller. It does tell
its telemetry object, which is replaced here by one that sends nothing anywhere. Everything here was
written for version `TINKER_VERSION`; a test fails when another one is installed.
"""

import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import tinker
from tinker._base_client import AsyncAPIClient

from lachesis.base.tinker_client import get_base_url, make_access_error

TINKER_VERSION = "0.38.0"
# The logger of all modules of the SDK, and what its messages about pauses have in common.
_LOGGER_NAME, _PAUSE_WORD = "tinker", "paused"
_ORIGINAL_SLEEP = AsyncAPIClient._sleep_for_retry

# Called with the HTTP status, or 0 without an answer, and a text. The SDK calls it in its thread.
ReportProblem = Callable[[int, str], None]


class ProblemListener:
    """Take the place of the SDK's telemetry, and report what the SDK waits out or fails at."""

    def __init__(self, report: ReportProblem) -> None:
        self._report = report

    def log(self, event_name: str, event_data: Any = None, severity: str = "INFO") -> bool:
        """Report an exception that the SDK has met; other events are not needed."""
        data = event_data if isinstance(event_data, dict) else {}
        # The SDK polls for a result that is not ready; that is no problem.
        if "exception" in data and data.get("status_code") != 408:
            text = str(data.get("detail") or data.get("exception") or event_name)
            self._report(int(data.get("status_code") or 0), text)
        return True

    @contextlib.contextmanager
    def capture_exceptions(self, **options: object) -> Iterator[None]:
        """Let exceptions pass, which their caller gets anyway."""
        yield

    @contextlib.asynccontextmanager
    async def acapture_exceptions(self, **options: object) -> AsyncIterator[None]:
        """Let exceptions pass, which their caller gets anyway."""
        yield

    async def close(self) -> None:
        """Do nothing, because nothing waits to be sent."""


class PauseLogHandler(logging.Handler):
    """Report what the SDK only logs: that sampling waits for capacity, or an account for money."""

    def __init__(self, report: ReportProblem) -> None:
        super().__init__(logging.WARNING)
        self._report = report

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if _PAUSE_WORD in message:
            self._report(402 if "billing" in message else 0, message)


def install_listener(service_client: tinker.ServiceClient, report: ReportProblem) -> None:
    """Report the problems of all clients that `service_client` makes from now on.

    This sends the requests that open the client's session.

    Raises:
        BillingError: The account cannot pay.
    """
    _report_repetitions(report)
    logger = logging.getLogger(_LOGGER_NAME)
    # Only the newest listener is told, as where one process trains twice.
    for handler in [one for one in logger.handlers if isinstance(one, PauseLogHandler)]:
        logger.removeHandler(handler)
    logger.addHandler(PauseLogHandler(report))
    try:
        holder = service_client.holder
    except AttributeError as error:
        # A fault of this version: it meets HTTP 402 before it has the fields to wait it out.
        if "billing" in str(error):
            raise make_access_error(402, "the account has no credit", get_base_url()) from error
        raise
    holder._telemetry = ProblemListener(report)  # type: ignore[assignment]


def _report_repetitions(report: ReportProblem) -> None:
    """Report each request that the SDK repeats, before it sleeps until then."""
    original = _ORIGINAL_SLEEP

    async def sleep_for_retry(self: AsyncAPIClient, *, response: Any, **options: Any) -> None:
        if response is None:
            report(0, "the connection was lost")
        else:
            report(response.status_code, _read_detail(response))
        await original(self, response=response, **options)

    AsyncAPIClient._sleep_for_retry = sleep_for_retry  # type: ignore[method-assign]


def _read_detail(response: Any) -> str:
    # The body of an error may not have been read yet.
    with contextlib.suppress(Exception):
        content = response.json()
        return str(content.get("detail") or content)
    return str(response.reason_phrase or "the request is repeated")
