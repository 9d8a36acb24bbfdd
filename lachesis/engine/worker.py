"""The model thread: whatever touches weights runs here. Operations run one after the other, in arrival order.

Samples are drawn between the passes of an operation: they read frozen snapshots, so the order between the two changes nothing.
While both wait, each gets about half of the time.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass

from lachesis.engine.futures import Future, Payload
from lachesis.engine.lora import Snapshot
from lachesis.engine.requests import Sampled, SampleRequest
from lachesis.engine.sampler import Job, Sampler
from lachesis.engine.wire import encode_sample
from lachesis.errors import EngineRequestError, LachesisError

log = logging.getLogger(__name__)
CANCELLED: Payload = {"error": "the request was cancelled", "category": "user"}
Work = Callable[[], Payload | Generator[None, None, Payload]]


@dataclass
class _Operation:
    future: Future
    call: Work
    passes: Generator[None, None, Payload] | None = None


class ModelThread:
    """Start it once; `submit` and `sample` may be called from the event loop only."""

    def __init__(self, sampler: Sampler, loop: asyncio.AbstractEventLoop) -> None:
        self._sampler, self._loop = sampler, loop
        self._operations: deque[_Operation] = deque()
        self._jobs: deque[Job] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="model", daemon=True)
        self._thread.start()

    def submit(self, future: Future, call: Work) -> None:
        """Run `call` when its turn comes; its result, or its error, becomes the future's."""
        with self._wake:
            self._operations.append(_Operation(future, call))
            self._wake.notify()

    def sample(self, future: Future, snapshot: Snapshot | None, request: SampleRequest) -> None:
        """Draw the samples of a checked request."""

        def done(found: Sampled | Exception) -> None:
            self._finish(future, refusal(found) if isinstance(found, Exception) else encode_sample(found))

        with self._wake:
            self._jobs.append(Job(request, snapshot, done))
            self._wake.notify()

    @property
    def waiting(self) -> int:
        """Requests for samples that have not begun."""
        return len(self._jobs) + self._sampler.waiting

    def stop(self) -> None:
        """End after the work in progress; what still waits is dropped."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._operations or self._jobs or self._sampler.busy or self._stopping)
                if self._stopping:
                    return
                while self._jobs:
                    self._sampler.add(self._jobs.popleft())
                operation = self._operations[0] if self._operations else None
            started = time.perf_counter()
            if operation and self._advance(operation):
                with self._wake:
                    self._operations.popleft()
            until = 2 * time.perf_counter() - started
            while self._sampler.busy:
                self._draw()
                if time.perf_counter() >= until or self._stopping:
                    break

    def _advance(self, operation: _Operation) -> bool:
        """Run the next part of an operation; whether it has ended."""
        try:
            if operation.passes is None:
                found = operation.call()
                if isinstance(found, bytes | dict):
                    self._finish(operation.future, found)
                    return True
                operation.passes = found
            next(operation.passes)
        except StopIteration as end:
            self._finish(operation.future, end.value)
        except Exception as error:
            self._finish(operation.future, refusal(error))
        else:
            return False
        return True

    def _draw(self) -> None:
        try:
            self._sampler.step()
        except Exception as error:
            for job in self._sampler.clear():
                job.done(error)

    def _finish(self, future: Future, payload: Payload) -> None:
        self._loop.call_soon_threadsafe(future.finish, payload)


def refusal(error: Exception) -> Payload:
    """An error as the protocol shows one: the client's fault, or ours."""
    if isinstance(error, EngineRequestError):
        return {"error": str(error), "category": "user"}
    if isinstance(error, LachesisError):
        return {"error": str(error), "category": "server"}
    log.error("the model thread failed at a request", exc_info=error)
    return {"error": f"{type(error).__name__}: {error}", "category": "server"}
