"""Watch the Tinker server's answers to a run: which faults are waited out, and which end the run.

A pause is over when the server has not refused anything for a while. A refused key and an account
without money end the run at its last checkpoint, because waiting does not help; so does a session
that the server has ended.
"""

import asyncio
import json
import logging
import re
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

from lachesis.base.errors import (
    LachesisError,
    ServerDownError,
    ServerProtocolError,
    SessionLostError,
    shorten,
)
from lachesis.base.files import write_private
from lachesis.base.json_text import Json
from lachesis.base.tinker_client import get_base_url, make_access_error

T = TypeVar("T")
log = logging.getLogger(__name__)
# A pause without a further refusal for this long is over.
QUIET_S = 20.0
# The file is written again at most this often while a pause goes on.
WRITE_INTERVAL_S = 5.0
_ACCESS_STATUSES = (401, 402, 403)
_STATUS_TEXT = re.compile(r"with status (\d{3})")
_DETAIL = re.compile(r"'detail': (['\"])(.*?)\1")
_LOST_SESSION = re.compile(
    r"there is no (model|sampler|session)|session .*(ended|expired|not found)|"
    r"(model|sampler|session) .*not found",
    re.IGNORECASE,
)


class ServerWatch:
    """Note the problems with the server of one attempt of a run.

    Args:
        file: Where the current pause is written, for whoever reports about the run.
    """

    def __init__(self, file: Path | None = None) -> None:
        self._file = file
        self._loop = asyncio.get_running_loop()
        self._failure: asyncio.Future[LachesisError] = self._loop.create_future()
        self._since = self._last_at = self._written_at = 0.0
        self._num_refusals = 0
        self._reason = ""

    def report(self, status: int, text: str) -> None:
        """Note a refusal of the server, or a lost connection (status 0). Any thread may call it."""
        if status in _ACCESS_STATUSES:
            error = make_access_error(status, _extract_detail(text), get_base_url())
            self._loop.call_soon_threadsafe(self._fail, error)
        else:
            self._loop.call_soon_threadsafe(self._note_pause, status, text)

    def report_exception(self, error: BaseException) -> None:
        """Note an error that a request of the SDK has raised, if it ends the run."""
        translated = self.translate(error)
        if translated is not None:
            self._fail(translated)

    def translate(self, error: BaseException) -> LachesisError | None:
        """Return the error that tells the run's user what to do; None if the cause is not an
        outage."""
        if isinstance(error, ServerProtocolError):
            return error
        text = str(error)
        status = getattr(error, "status_code", None)
        # What the SDK raises for a result that it may not fetch has its status in the text only.
        if status is None and (found := _STATUS_TEXT.search(text)):
            status = int(found.group(1))
        if status in _ACCESS_STATUSES:
            return make_access_error(int(status), _extract_detail(text), get_base_url())
        if _LOST_SESSION.search(text):
            return SessionLostError(
                f"the Tinker server has ended the session of this run ({_extract_detail(text)}); "
                "its checkpoints are kept: `lachesis resume RUN` goes on from the last one"
            )
        if type(error).__name__ in ("APIConnectionError", "APITimeoutError"):
            return ServerDownError(
                f"the Tinker server at {get_base_url()} could not be reached for minutes "
                f"({_extract_detail(text)}); when it answers again, `lachesis resume RUN` goes on "
                "from the last checkpoint"
            )
        return None

    def get_pause(self) -> Json | None:
        """Return the reason of the current pause and when it began, or None."""
        if not self._reason or time.time() - self._last_at > QUIET_S:
            return None
        return {
            "reason": self._reason,
            "since": self._since,
            "last_at": self._last_at,
            "refusals": self._num_refusals,
        }

    async def run_unless_failed(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of `work`, but cancel it when the server has ended the run.

        Raises:
            LachesisError: Why the server does not go on with the run.
        """
        task: asyncio.Future[T] = asyncio.ensure_future(work)
        try:
            pending: set[asyncio.Future[Any]] = {task, self._failure}
            await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            if self._failure.done() and not task.done():
                task.cancel()
                await asyncio.wait({task})
                raise self._failure.result()
            return await task
        except LachesisError:
            raise
        except Exception as error:
            # The request that failed may be older than the reason why all others fail.
            if self._failure.done():
                raise self._failure.result() from error
            if (translated := self.translate(error)) is not None:
                raise translated from error
            raise
        finally:
            task.cancel()

    def _fail(self, error: LachesisError) -> None:
        if not self._failure.done():
            log.error("%s", error)
            self._failure.set_result(error)

    def _note_pause(self, status: int, text: str) -> None:
        """Note that the server makes the run wait, in the log once and in the file now and then."""
        now = time.time()
        if now - self._last_at > QUIET_S:
            self._since, self._num_refusals = now, 0
            log.warning("the Tinker server makes this run wait: %s", _describe(status, text))
        self._last_at, self._reason = now, _describe(status, text)
        self._num_refusals += 1
        if self._file is not None and now - self._written_at > WRITE_INTERVAL_S:
            self._written_at = now
            # A disk that is full must not end a run that waits for its server.
            try:
                write_private(self._file, json.dumps(self.get_pause()))
            except LachesisError as error:
                log.warning("the pause was not recorded: %s", error)


def _extract_detail(text: str) -> str:
    """Return the server's own message, without the words that the SDK adds."""
    if found := _DETAIL.search(text):
        text = found.group(2)
    return shorten(" ".join(text.split()), 160)


def _describe(status: int, text: str) -> str:
    """Return the reason of a pause in a few words."""
    words = {429: "too many requests", 0: "no connection"}
    name = words.get(status, "a fault of the server" if status >= 500 else "refused")
    short_text = _extract_detail(text)
    if status == 0:
        return short_text if "paused" in text else f"{name}: {short_text}"
    return f"HTTP {status}, {name}: {short_text}"
