"""Keep submitted requests and their results.

Every request is answered at once with an id, and the client fetches the result by long polling.
"""

import asyncio
import itertools
import time
import uuid
from dataclasses import dataclass, field
from typing import Any

# How long a result is kept, because the client asks again when a response is lost.
RESULT_RETENTION_S = 600.0

# Protobuf for forward-backward and sampling, JSON for everything else.
Payload = bytes | dict[str, Any]
CANCELLED: Payload = {"error": "the request was cancelled", "category": "user"}


@dataclass
class RequestFuture:
    """Hold the result of one submitted request."""

    request_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    payload: Payload | None = None
    done_at: float | None = None
    is_cancelled: bool = False
    response_fields: dict[str, Any] = field(default_factory=dict)
    _done: asyncio.Event = field(default_factory=asyncio.Event)

    def finish(self, payload: Payload) -> None:
        """Set the result once; call this on the event loop's thread only."""
        if self.payload is not None:
            return
        self.payload = payload
        self.done_at = time.monotonic()
        self._done.set()

    async def wait(self, timeout_s: float) -> Payload | None:
        """Return the result, or None when there is none after `timeout_s` seconds."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._done.wait()
        except TimeoutError:
            return None
        return self.payload


class FutureRegistry:
    """Find futures by id, and by the key of repeated submissions of a request."""

    def __init__(self) -> None:
        self._by_id: dict[str, RequestFuture] = {}
        self._by_key: dict[tuple[str, int], RequestFuture] = {}

    def get_or_create(self, key: tuple[str, int] | None) -> tuple[RequestFuture, bool]:
        """Return the future of this request and whether it is new.

        `key` is the id of the model or session, and the sequence number of the request.
        """
        self._prune()
        if key is not None and key in self._by_key:
            return self._by_key[key], False
        future = RequestFuture()
        self._by_id[future.request_id] = future
        if key is not None:
            self._by_key[key] = future
        return future, True

    def get(self, request_id: str) -> RequestFuture | None:
        """Return the future of this id, if it is still kept."""
        return self._by_id.get(request_id)

    def _prune(self) -> None:
        """Forget results that were kept long enough."""
        # Insertion order is close to completion order, so checking the oldest few is enough.
        horizon = time.monotonic() - RESULT_RETENTION_S
        for request_id in list(itertools.islice(self._by_id, 16)):
            done_at = self._by_id[request_id].done_at
            if done_at is not None and done_at <= horizon:
                del self._by_id[request_id]
        for key in list(itertools.islice(self._by_key, 16)):
            if self._by_key[key].request_id not in self._by_id:
                del self._by_key[key]
