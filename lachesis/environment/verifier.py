"""Calls of a scoring function, whatever it does: raise, hang, or give something that is no score."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lachesis.base.failure_reasons import describe_exception
from lachesis.environment import clock
from lachesis.environment.outcome import Invalid, invalid

log = logging.getLogger(__name__)
MOST_STUCK = 8
"""So many calls that never end, and none is made any more: each of them keeps a thread."""
TOO_MANY = "too many calls of the verifier have not ended; none is made until one of them has"
Arguments = tuple[Any, ...]


@dataclass(frozen=True)
class Result:
    value: Any = None
    error: Exception | None = None


class Verifier:
    """What a coroutine does for several answers is done at once. Any other function runs in a thread, for one answer at a time,
    so that one which hangs keeps nobody else."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        """For each call."""
        self._turn = asyncio.Lock()
        self._stuck = 0

    async def values(self, scoring: Callable[..., Any], calls: Sequence[Arguments]) -> list[Any]:
        """What the function gives with each of these arguments, or an invalid outcome."""
        results: list[Result] = []
        while len(results) < len(calls):
            left = calls[len(results) :]
            if inspect.iscoroutinefunction(scoring):
                results += [Result(scoring(*one)) for one in left]
            else:
                results += await self._run(scoring, left)
        return await asyncio.gather(*map(self._value, results))

    async def _value(self, result: Result) -> Any:
        try:
            if result.error is not None:
                raise result.error
            if not inspect.isawaitable(result.value):
                return result.value
            async with in_time(self.timeout_s, "the verifier"):
                return await result.value
        except Invalid as error:
            return invalid(str(error))
        except Exception as error:
            log.warning("the verifier raised", exc_info=error)
            return invalid(f"the verifier raised {describe_exception(error)}")

    async def _run(self, scoring: Callable[..., Any], calls: Sequence[Arguments]) -> list[Result]:
        """The results up to the first call that takes too long; at least one."""
        async with self._turn:
            if self._stuck > MOST_STUCK:
                return [Result(error=Invalid(TOO_MANY))]
            thread = Calls(scoring, calls)
            ended = thread.begun()
            try:
                while not ended.done() and (left := thread.call_began + self.timeout_s - time.monotonic()) > 0:
                    await asyncio.wait([ended], timeout=left)
            finally:
                results = list(thread.results)
                if not ended.done():  # its thread cannot be ended
                    self._stuck += 1
                    thread.give_up(self._one_less)
        late = Result(error=Invalid(f"the verifier was not done after {self.timeout_s:g} s"))
        return results if len(results) == len(calls) else [*results, late]

    def _one_less(self) -> None:
        self._stuck -= 1


class Calls:
    """Calls of one function, one after the other, in a thread of their own, which does not keep the process from ending."""

    def __init__(self, function: Callable[..., Any], calls: Sequence[Arguments]) -> None:
        self.function, self.calls = function, calls
        self.results: list[Result] = []
        self.call_began = time.monotonic()
        """When the call under way was made."""
        self._given_up: Callable[[], None] | None = None
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[None] = self._loop.create_future()

    def begun(self) -> asyncio.Future[None]:
        """Begin; the future is done after the last call."""
        threading.Thread(target=self._run, name="verifier", daemon=True).start()
        return self._ended

    def give_up(self, then: Callable[[], None]) -> None:
        """Make no further call; `then` is done when the one under way ends."""
        self._given_up = then

    def _run(self) -> None:
        for values in self.calls:
            self.call_began = time.monotonic()
            try:
                result = Result(self.function(*values))
            except Exception as error:
                result = Result(error=error)
            except BaseException as error:
                ended = RuntimeError(f"{type(error).__name__} ended it")
                result = Result(error=ended.with_traceback(error.__traceback__))
            self.results.append(result)
            if self._given_up is not None:
                break
        with contextlib.suppress(RuntimeError):  # the loop has been closed meanwhile
            self._loop.call_soon_threadsafe(self._finish)

    def _finish(self) -> None:
        if self._given_up is not None:
            self._given_up()
        self._ended.set_result(None)


@contextlib.asynccontextmanager
async def in_time(seconds: float, who: str) -> AsyncIterator[None]:
    """Raises Invalid when the block, without its waits for samples and for a sandbox, takes longer than this."""
    try:
        async with clock.limited(seconds) as limit:
            yield
    except TimeoutError:
        if not limit.expired():
            raise  # one of its own
        raise Invalid(f"{who} was not done after {seconds:g} s") from None
