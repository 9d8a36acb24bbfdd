"""Queue requests for the engine's worker, and keep their results for the clients."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

from fastapi import HTTPException

from lachesis.tinker_server.engine_interface import OperationCall, TinkerEngine, Worker
from lachesis.tinker_server.futures import CANCELLED, FutureRegistry
from lachesis.tinker_server.json_messages import SampleBody
from lachesis.tinker_server.sample_messages import MAX_SAMPLES_PER_REQUEST

LONG_POLL_S = 30.0
# Maximum number of waiting sampling requests; the client of a further one waits a second and
# retries.
MAX_WAITING_REQUESTS = 10_000


class RequestDispatcher:
    """Connect the HTTP routes with the engine, its worker and its futures."""

    def __init__(self, engine: TinkerEngine) -> None:
        self.engine = engine
        self.futures = FutureRegistry()
        self.worker: Worker | None = None
        self.client_counts: dict[str, int] = {}
        # The highest sequence id that each model has received.
        self.last_sequence_ids: dict[str, int] = {}

    def submit(
        self, key: tuple[str, int | None], call: OperationCall, **response_fields: object
    ) -> dict[str, Any]:
        """Queue an operation, unless this request has been submitted before, and return its
        future's id.

        Operations of one model run in the order of their sequence ids. An id may be left out, but a
        request whose id is lower than an earlier one fails.
        """
        owner, sequence_id = key
        future, is_new = self.futures.get_or_create(
            (owner, sequence_id) if sequence_id is not None else None
        )
        # A client that has lost a response sends its request again with the same id.
        if is_new:
            future.response_fields = response_fields
            last_sequence_id = self.last_sequence_ids.get(owner, -1)
            if sequence_id is not None and sequence_id <= last_sequence_id:
                message = (
                    f"the request with sequence id {sequence_id} came after that with "
                    f"{last_sequence_id}; ids must increase in the order of sending"
                )
                future.finish({"error": message, "category": "user"})
            else:
                if sequence_id is not None:
                    self.last_sequence_ids[owner] = sequence_id
                assert self.worker is not None
                self.worker.submit(future, call)
        return {"request_id": future.request_id, **future.response_fields}

    def submit_sample(self, body: SampleBody) -> dict[str, Any]:
        """Queue a sampling request and return its future's id."""
        assert self.worker is not None
        entry = self.engine.samplers.get(body.sampling_session_id)
        if entry is None:
            raise HTTPException(
                404, f"there is no sampler {body.sampling_session_id}; its session may have ended"
            )
        if self.worker.num_waiting >= MAX_WAITING_REQUESTS:
            message = f"{self.worker.num_waiting} requests wait for samples; ask again later"
            raise HTTPException(429, message, {"Retry-After": "1"})
        future, is_new = self.futures.get_or_create((body.sampling_session_id, body.seq_id))
        if is_new:
            num_samples = min(max(0, body.num_samples), MAX_SAMPLES_PER_REQUEST)
            # The SDK expects an id per sample before there is a result.
            future.response_fields["sample_sequence_ids"] = [
                f"{future.request_id}-{index}" for index in range(num_samples)
            ]
            try:
                request = body.to_sample_request(entry.limits, future)
            except Exception as error:  # Whatever it is, the client must not wait for ever.
                future.finish(self.worker.make_error(error))
            else:
                entry.last_used = time.monotonic()
                self.worker.submit_sample(future, entry, request)
        return {"request_id": future.request_id, **future.response_fields}

    async def call_soon(self, call: Callable[[], str]) -> str:
        """Run a short call before the operations that wait.

        Raises:
            EngineRequestError: The call has raised it.
        """
        assert self.worker is not None
        return await asyncio.wrap_future(self.worker.call_soon(call))

    def cancel(self, request_id: str) -> str:
        """Cancel a request and return its state.

        Returns:
            `ok` if it is cancelled now; `running` if it is an operation that has begun, which will
                complete; `finished` if it has its result or does not exist.
        """
        assert self.worker is not None
        future = self.futures.get(request_id)
        if future is None or future.payload is not None:
            return "finished"
        # An operation that has begun changes the weights, so it is not interrupted.
        if not self.worker.cancel_queued_operation(future):
            return "running"
        future.is_cancelled = True
        future.finish(CANCELLED)
        return "ok"

    async def end_expired_sessions(self) -> None:
        """End sessions whose client no longer sends heartbeats."""
        while True:
            await asyncio.sleep(30)
            for session_id in self.engine.find_expired_sessions():
                self.end_session(session_id)

    def end_session(self, session_id: str) -> None:
        """End a session and free its models and samplers."""
        for values_by_owner in (self.client_counts, self.last_sequence_ids):
            # A list, because the dictionary changes meanwhile.
            for owner_id in list(values_by_owner):
                if owner_id.startswith(f"{session_id}:"):
                    del values_by_owner[owner_id]
        self.submit((f"end:{session_id}", None), lambda: self.engine.end_session(session_id))
