"""Call a scoring function that may raise or hang, under a time limit that pauses."""

import asyncio
import contextlib
import contextvars
import inspect
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from lachesis.environment_toolkit.failure_reasons import describe_exception
from lachesis.environment_toolkit.rollout import Invalid, build_invalid

log = logging.getLogger(__name__)
# After this many calls that never return, no further call is made, because each keeps a thread.
MAX_STUCK_CALLS = 8
TOO_MANY_STUCK_MESSAGE = (
    "too many calls of the verifier have not returned; no further call is made until one does"
)
Arguments = tuple[Any, ...]


@dataclass(frozen=True)
class ScoringResult:
    """Hold the return value or the exception of one call."""

    value: Any = None
    error: Exception | None = None


class Verifier:
    """Call a scoring function for several answers.

    Coroutines run concurrently. Any other function runs in a thread, for one answer at a time, so
    that a call that hangs does not block the event loop.
    """

    def __init__(self, timeout_s: float) -> None:
        # The time limit of each call in seconds.
        self.timeout_s = timeout_s
        self._lock = asyncio.Lock()
        self._num_stuck = 0

    async def score_all(self, scoring: Callable[..., Any], calls: Sequence[Arguments]) -> list[Any]:
        """Return the function's value for each tuple of arguments, or an invalid outcome."""
        results: list[ScoringResult] = []
        while len(results) < len(calls):
            remaining_calls = calls[len(results) :]
            if inspect.iscoroutinefunction(scoring):
                results += [ScoringResult(scoring(*arguments)) for arguments in remaining_calls]
            else:
                results += await self._run_in_thread(scoring, remaining_calls)
        return await asyncio.gather(*map(self._resolve, results))

    async def _resolve(self, result: ScoringResult) -> Any:
        """Return what the scoring function gives within the limit, or an invalid outcome."""
        try:
            if result.error is not None:
                raise result.error
            if not inspect.isawaitable(result.value):
                return result.value
            async with limit_time(self.timeout_s, "the verifier"):
                return await result.value
        except Invalid as error:
            return build_invalid(str(error))
        except Exception as error:
            log.warning("the verifier raised", exc_info=error)
            return build_invalid(f"the verifier raised {describe_exception(error)}")

    async def _run_in_thread(
        self, scoring: Callable[..., Any], calls: Sequence[Arguments]
    ) -> list[ScoringResult]:
        """Return the results up to the first call that takes too long; at least one result."""
        async with self._lock:
            if self._num_stuck > MAX_STUCK_CALLS:
                return [ScoringResult(error=Invalid(TOO_MANY_STUCK_MESSAGE))]
            thread = ScoringThread(scoring, calls)
            finished = thread.start()
            try:
                while (
                    not finished.done()
                    and (remaining_s := thread.call_started_at + self.timeout_s - time.monotonic())
                    > 0
                ):
                    await asyncio.wait([finished], timeout=remaining_s)
            finally:
                results = list(thread.results)
                if not finished.done():  # Python cannot end the thread.
                    self._num_stuck += 1
                    thread.give_up(self._release_stuck)
        timeout_result = ScoringResult(
            error=Invalid(f"the verifier was not done after {self.timeout_s:g} s")
        )
        if len(results) == len(calls):
            return results
        return [*results, timeout_result]

    def _release_stuck(self) -> None:
        self._num_stuck -= 1


class ScoringThread:
    """Call a function several times in a daemon thread, one call after the other."""

    def __init__(self, function: Callable[..., Any], calls: Sequence[Arguments]) -> None:
        self.function, self.calls = function, calls
        self.results: list[ScoringResult] = []
        # When the current call began, on the monotonic clock.
        self.call_started_at = time.monotonic()
        self._on_finish: Callable[[], None] | None = None
        self._loop = asyncio.get_running_loop()
        self._finished: asyncio.Future[None] = self._loop.create_future()

    def start(self) -> asyncio.Future[None]:
        """Start the thread; the returned future is done after the last call."""
        threading.Thread(target=self._run, name="verifier", daemon=True).start()
        return self._finished

    def give_up(self, on_finish: Callable[[], None]) -> None:
        """Make no further call, and call `on_finish` when the current one returns."""
        self._on_finish = on_finish

    def _run(self) -> None:
        """Call the function for each answer, and hand the results to the event loop."""
        for values in self.calls:
            self.call_started_at = time.monotonic()
            try:
                result = ScoringResult(self.function(*values))
            except Exception as error:
                result = ScoringResult(error=error)
            except BaseException as error:
                failure = RuntimeError(f"{type(error).__name__} ended it")
                result = ScoringResult(error=failure.with_traceback(error.__traceback__))
            self.results.append(result)
            if self._on_finish is not None:
                break
        with contextlib.suppress(RuntimeError):  # The loop may have been closed meanwhile.
            self._loop.call_soon_threadsafe(self._finish)

    def _finish(self) -> None:
        if self._on_finish is not None:
            self._on_finish()
        self._finished.set_result(None)


@contextlib.asynccontextmanager
async def limit_time(seconds: float, label: str) -> AsyncIterator[None]:
    """Raise Invalid when the block takes longer than `seconds`.

    Waits for samples and for a sandbox do not count.
    """
    try:
        async with pausable_timeout(seconds) as timeout:
            yield
    except TimeoutError:
        if not timeout.expired():
            raise  # The block itself raised it.
        raise Invalid(f"{label} was not done after {seconds:g} s") from None


_current_timeout: contextvars.ContextVar[asyncio.Timeout | None] = contextvars.ContextVar(
    "limit", default=None
)


@contextlib.asynccontextmanager
async def pausable_timeout(seconds: float) -> AsyncIterator[asyncio.Timeout]:
    """Limit the time of a block like `asyncio.timeout`, not counting `pause_timeout`."""
    async with asyncio.timeout(seconds) as timeout:
        token = _current_timeout.set(timeout)
        try:
            yield timeout
        finally:
            _current_timeout.reset(token)


@contextlib.contextmanager
def pause_timeout() -> Iterator[None]:
    """Stop the clock of the enclosing `pausable_timeout`, if any, during this block."""
    timeout, loop_time = _current_timeout.get(), asyncio.get_running_loop().time
    if timeout is not None and not timeout.expired():
        deadline = timeout.when()
    else:
        deadline = None
    if timeout is None or deadline is None:  # There is no limit, or its clock is stopped already.
        yield
        return
    remaining_s = deadline - loop_time()
    timeout.reschedule(None)
    try:
        yield
    finally:
        if not timeout.expired():
            timeout.reschedule(loop_time() + remaining_s)
