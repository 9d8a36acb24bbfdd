"""The model thread: whatever touches weights runs here, in arrival order.

When a sampling request comes to the head of the queue, every waiting request for the same weights joins it in one batch;
they read a frozen snapshot, so passing a training request that stands between changes nothing.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from lachesis.engine.futures import Future, Payload
from lachesis.engine.model import Snapshot
from lachesis.engine.sampler import Sampler, SampleRequest
from lachesis.engine.wire import encode_sample
from lachesis.errors import EngineRequestError, LachesisError

T = TypeVar("T")
log = logging.getLogger(__name__)

MAX_BATCH_TOKENS = 2**16
"""Cache positions (rows x longest sequence) of one sampling batch."""
PROMPT_LOGITS_COST = 16


@dataclass
class _Operation:
    future: Future
    call: Callable[[], Payload]


@dataclass
class _Sampling:
    future: Future
    snapshot: Snapshot | None
    request: SampleRequest

    def cost(self) -> int:
        """In cache positions; logits of a whole prompt weigh as much as the cache of many."""
        length = len(self.request.prompt) + (self.request.max_tokens or 256)
        return length * self.request.num_samples + (PROMPT_LOGITS_COST * length if self.request.prompt_logprobs else 0)


class ModelThread:
    """Start it once; `submit` and `sample` may be called from the event loop only."""

    def __init__(self, sampler: Sampler, loop: asyncio.AbstractEventLoop) -> None:
        self._sampler, self._loop = sampler, loop
        self._waiting: deque[_Operation | _Sampling] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="model", daemon=True)
        self._thread.start()

    def submit(self, future: Future, call: Callable[[], Payload]) -> None:
        """Run `call` when its turn comes; its result, or its error, becomes the future's."""
        self._enqueue(_Operation(future, call))

    def sample(self, future: Future, snapshot: Snapshot | None, request: SampleRequest) -> None:
        self._enqueue(_Sampling(future, snapshot, request))

    def stop(self) -> None:
        """End after the work in progress; what still waits is dropped."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join()

    def _enqueue(self, job: _Operation | _Sampling) -> None:
        with self._wake:
            self._waiting.append(job)
            self._wake.notify()

    def _run(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._waiting or self._stopping)
                if self._stopping:
                    return
                job = self._waiting.popleft()
                batch = self._companions(job) if isinstance(job, _Sampling) else []
            if isinstance(job, _Operation):
                self._finish(job.future, _guarded(job.call))
            else:
                self._sample(batch)

    def _companions(self, first: _Sampling) -> list[_Sampling]:
        batch, left, cost = [first], deque[_Operation | _Sampling](), first.cost()
        for job in self._waiting:
            if isinstance(job, _Sampling) and _goes_with(job, first) and cost + job.cost() <= MAX_BATCH_TOKENS:
                batch.append(job)
                cost += job.cost()
            else:
                left.append(job)
        self._waiting = left
        return batch

    def _sample(self, batch: list[_Sampling]) -> None:
        for job in batch:
            if job.future.cancelled:
                self._finish(job.future, {"error": "the request was cancelled", "category": "user"})
        batch = [job for job in batch if not job.future.cancelled]
        if not batch:
            return

        def generate() -> list[bytes]:
            self._sampler.model.use(batch[0].snapshot)
            results = self._sampler.generate([job.request for job in batch])
            return [encode_sample(result.sequences, result.prompt_logprobs) for result in results]

        outcome = _guarded(generate)
        for index, job in enumerate(batch):
            self._finish(job.future, outcome[index] if isinstance(outcome, list) else outcome)

    def _finish(self, future: Future, payload: Payload) -> None:
        self._loop.call_soon_threadsafe(future.finish, payload)


def _goes_with(job: _Sampling, first: _Sampling) -> bool:
    # One request for prompt logprobs would make the logits of every position of every prompt in its batch.
    return job.snapshot is first.snapshot and job.request.prompt_logprobs == first.request.prompt_logprobs


def _guarded(call: Callable[[], T]) -> T | dict[str, str]:
    """The call's result, or its error as the protocol shows one: the client's fault, or ours."""
    try:
        return call()
    except EngineRequestError as error:
        return {"error": str(error), "category": "user"}
    except LachesisError as error:
        return {"error": str(error), "category": "server"}
    except Exception as error:
        log.exception("the model thread failed at a request")
        return {"error": f"{type(error).__name__}: {error}", "category": "server"}
