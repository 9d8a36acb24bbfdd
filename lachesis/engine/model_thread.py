"""Run everything that touches weights on one thread, in the order of arrival.

Samples are drawn between the passes of an operation. They read frozen snapshots, so their order
relative to an operation changes no result. While both wait, each gets about half of the time.
"""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future as ConcurrentFuture
from dataclasses import dataclass, field

from lachesis.base.errors import EngineRequestError, LachesisError
from lachesis.engine.base_model.device import is_out_of_memory
from lachesis.engine.base_model.forward_pass import BaseLanguageModel
from lachesis.engine.base_model.lora_layers import LoraAdapter
from lachesis.engine.sampling.admission import SamplingJob
from lachesis.engine.sampling.sampler import Sampler
from lachesis.tinker_server.engine_interface import OperationCall, Result
from lachesis.tinker_server.futures import Payload, RequestFuture
from lachesis.tinker_server.json_messages import ModelLimits
from lachesis.tinker_server.protobuf_messages import encode_sample_response
from lachesis.tinker_server.sample_messages import SampleRequest, SampleResponse

log = logging.getLogger(__name__)
OUT_OF_MEMORY = (
    "the memory of the device does not suffice, not even for one sequence at a time; set a smaller "
    "max_token_length, or base_weights=8bit"
)


@dataclass(eq=False)
class _Operation:
    future: RequestFuture
    call: OperationCall
    passes: Generator[None, None, Payload] | None = None
    has_begun: bool = False


class ModelThread:
    """Run operations and samplers that the event loop alone submits."""

    def __init__(self, samplers: Sequence[Sampler], loop: asyncio.AbstractEventLoop) -> None:
        self._samplers, self._loop = samplers, loop
        self._operations: deque[_Operation] = deque()
        self._jobs: deque[tuple[Sampler, SamplingJob]] = deque()
        self._short_calls: deque[Callable[[], None]] = deque()
        self._condition = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="model", daemon=True)
        self._thread.start()

    def submit(self, future: RequestFuture, call: OperationCall) -> None:
        """Queue an operation; its result or its error becomes that of the future."""
        with self._condition:
            self._operations.append(_Operation(future, call))
            self._condition.notify()

    def call_soon(self, call: Callable[[], Result]) -> ConcurrentFuture[Result]:
        """Run a short call between two passes, before all operations, and return its future.

        A call whose future is cancelled before its turn is not run.
        """
        future: ConcurrentFuture[Result] = ConcurrentFuture()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return  # Setting the result of a cancelled future would raise and end this thread.
            try:
                future.set_result(call())
            except Exception as error:
                future.set_exception(error)

        with self._condition:
            self._short_calls.append(run)
            self._condition.notify()
        return future

    def cancel_queued_operation(self, future: RequestFuture) -> bool:
        """Remove the operation of a future from the queue.

        Returns:
            False if the operation has begun, in which case it completes. True if it will not run,
                or if the future is not that of an operation.
        """
        with self._condition:
            for operation in self._operations:
                if operation.future is future:
                    if operation.has_begun:
                        return False
                    self._operations.remove(operation)
                    return True
        return True

    def submit_sample(
        self, future: RequestFuture, sampler: "SamplerEntry", request: SampleRequest
    ) -> None:
        """Queue a checked sampling request with one of the samplers."""
        job_sampler, snapshot = sampler.served_model.sampler, sampler.snapshot

        def finish(result: SampleResponse | Exception) -> None:
            self._finish(
                future,
                self.make_error(result)
                if isinstance(result, Exception)
                else encode_sample_response(result),
            )

        with self._condition:
            self._jobs.append((job_sampler, SamplingJob(request, snapshot, finish)))
            self._condition.notify()

    def make_error(self, error: Exception) -> Payload:
        """Return an error in the protocol's format."""
        return make_tinker_error(error)

    @property
    def num_waiting(self) -> int:
        """Return the number of sampling requests that have not begun."""
        return len(self._jobs) + sum(sampler.num_waiting for sampler in self._samplers)

    def stop(self) -> None:
        """End the thread after the work in progress; waiting requests are dropped."""
        with self._condition:
            self._stopping = True
            self._condition.notify()
        self._thread.join()

    def _run(self) -> None:
        """Work in turns: add samples, call short requests, advance an operation, sample a round."""
        while True:
            with self._condition:
                self._condition.wait_for(self._has_work)
                if self._stopping:
                    return
                while self._jobs:
                    sampler, job = self._jobs.popleft()
                    sampler.add(job)
                operation = self._operations[0] if self._operations else None
                if operation:
                    operation.has_begun = True
                short_calls, self._short_calls = self._short_calls, deque()
            for call in short_calls:
                call()
            started = time.perf_counter()
            if operation and self._advance(operation):
                with self._condition:
                    self._operations.popleft()
            sampling_deadline = 2 * time.perf_counter() - started
            while self._is_sampling:
                self._step_samplers()
                if time.perf_counter() >= sampling_deadline or self._stopping:
                    break

    def _has_work(self) -> bool:
        return bool(
            self._operations
            or self._jobs
            or self._short_calls
            or self._is_sampling
            or self._stopping
        )

    @property
    def _is_sampling(self) -> bool:
        return any(sampler.is_busy for sampler in self._samplers)

    def _advance(self, operation: _Operation) -> bool:
        """Run the next part of an operation and return whether it has ended."""
        try:
            if operation.passes is None:
                result = operation.call()
                if isinstance(result, bytes | dict):
                    self._finish(operation.future, result)
                    return True
                operation.passes = result
            next(operation.passes)
        except StopIteration as end:
            self._finish(operation.future, end.value)
        except Exception as error:
            self._finish(operation.future, self.make_error(error))
        else:
            return False
        return True

    def _step_samplers(self) -> None:
        for sampler in self._samplers:
            if sampler.is_busy:
                step_sampler(sampler)

    def _finish(self, future: RequestFuture, payload: Payload) -> None:
        self._loop.call_soon_threadsafe(future.finish, payload)


def step_sampler(sampler: Sampler) -> None:
    """Extend all sequences of a sampler by a token; an error ends its requests.

    Where memory runs out, fewer sequences at a time are sampled from then on.
    """
    try:
        sampler.step()
    except Exception as error:
        if is_out_of_memory(error) and sampler.restart_with_less_memory():
            log.warning("sampling ran out of memory; fewer sequences at a time from now on")
            return
        for job in sampler.clear():
            job.on_done(error)


def make_tinker_error(error: Exception) -> Payload:
    """Return an error in the protocol's format, as a fault of the client or of the server."""
    if isinstance(error, EngineRequestError):
        return {"error": str(error), "category": "user"}
    if isinstance(error, LachesisError):
        return {"error": str(error), "category": "server"}
    if is_out_of_memory(error):
        log.error("out of memory: %s", error)
        return {"error": f"{OUT_OF_MEMORY}: {str(error).splitlines()[0]}", "category": "server"}
    log.error("the model thread failed at a request", exc_info=error)
    return {"error": f"{type(error).__name__}: {error}", "category": "server"}


@dataclass(frozen=True)
class ServedModel:
    """Hold a base model and the sampler that uses it."""

    base: BaseLanguageModel
    sampler: Sampler


@dataclass
class SamplerEntry:
    """Hold frozen weights for sampling; a `snapshot` of None means the base model."""

    sampler_id: str
    served_model: ServedModel
    snapshot: LoraAdapter | None
    model_path: str | None
    last_used: float = field(default_factory=time.monotonic)

    @property
    def model_name(self) -> str:
        """Return the name of the base model."""
        return self.served_model.base.source

    @property
    def limits(self) -> ModelLimits:
        """Return the limits that requests are checked against."""
        return self.served_model.base
