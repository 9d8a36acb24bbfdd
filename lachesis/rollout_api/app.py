"""`python -m lachesis.rollout_api.app --port N --offpolicy K --ahead A --environments E`: Atropos' `run-api` on loopback, with
guards before it, and shares for several environments; see `lachesis.rollout_api.weighted_queue`.

What would block or poison the API for good is refused with its reason, and what it would keep without end is bounded:

    groups before a trainer has registered       503, so that the environment sends them again
    groups whose lists do not fit each other     422, and counted as refused; the others of a list are taken
    groups without a finite score per rollout    422, and counted as refused
    a queue of more than K + 1 batches           its oldest groups are dropped and counted
    more than K batches formed but not taken     the oldest are dropped, their groups counted
    another Host or Origin, 200 MB of a body     403, 413

An environment asks for the state of the queue ten times a second. While K + A batches wait, which is all that it may make, the
answer waits as well, a second at most: so the next batch is begun at the moment at which one is taken, not a while after.
`GET /batch?wait=SECONDS` answers, once a trainer has registered, when there is a batch, or after that time without one.
`GET /counts` tells `received`, `refused` and `dropped` groups, the last reason of a refusal, and what a batch is waiting for:
`queued` and `buffered` rollouts by size of their groups, `batch_size`, and the environment whose `turn` it is where others have
groups that wait. The API keeps all of this in memory only.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import json
from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qs

from lachesis.base.errors import shorten
from lachesis.base.http_guard import HttpGuard, send_json, replay_body
from lachesis.rollout_api.scored_group import find_fault, find_unwritable_value
from lachesis.rollout_api.weighted_queue import Shares

HOST = "127.0.0.1"
MOST_BYTES = 200_000_000
"""Of one message; a group of 64 rollouts of 32,000 tokens with their logprobs has some 50 MB as JSON."""
MOST_WAIT_S = 30.0
HOLD_S = 1.0
"""An environment looks after its evaluations and checkpoints between two answers."""
DATA = ("/scored_data", "/scored_data_list")
Json = dict[str, Any]


class Bounded:
    """The API's application with its guards. `offpolicy` is how many batches may wait, of so many environments, beside those
    that the trainer takes `ahead`."""

    def __init__(self, app: Any, *, offpolicy: int, ahead: int = 0, environments: int = 1) -> None:
        self.app, self.state, self.offpolicy, self.most_asked = app, app.state, offpolicy, offpolicy + ahead
        self.shares = Shares(environments)
        self.counts: collections.Counter[str] = collections.Counter()
        self.refusal: str | None = None
        self._came = asyncio.Event()
        self._taken = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        path = scope.get("path")
        if scope["type"] == "http" and path == "/counts":
            await send_json(send, 200, self.report())
        elif scope["type"] == "http" and path in DATA:
            await self._take(scope, receive, send)
        elif scope["type"] == "http" and path == "/status-env":
            await self._tell_status(scope, receive, send)
        else:
            if path == "/reset_data":
                self.shares = Shares(self.shares.expected)
            if path == "/batch":
                self._arrange()
                self._forget_stale()
                seconds = _wait_s(scope.get("query_string", b""))
                registered = getattr(self.state, "batchsize", -1) >= 1
                if seconds and registered and not self._is_full():
                    await receive()  # all of a request without a body
                    if not await self._batch_came(receive, seconds):
                        return
                    receive = replay_body(b"", receive)
            await self.app(scope, receive, send)
            self._taken.set()

    async def _batch_came(self, receive: Any, seconds: float) -> bool:
        """Wait so long for a batch; false when who has asked is gone meanwhile, and must not be given one."""
        gone = asyncio.ensure_future(receive())  # the next message says so
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not self._is_full() and not gone.done():
                    self._came.clear()
                    came = asyncio.ensure_future(self._came.wait())
                    await asyncio.wait({came, gone}, return_when=asyncio.FIRST_COMPLETED)
                    came.cancel()
        if gone.done():
            return False
        gone.cancel()
        return True

    def _arrange(self) -> None:
        self.shares.arrange(self._queue(), self._envs())

    async def _tell_status(self, scope: Any, receive: Any, send: Any) -> None:
        """The queue as one environment shall see it, once there is something to do for it, or after a while."""
        body = await read(receive)
        receive = replay_body(body, receive)
        try:
            number = json.loads(body)["env_id"]
        except (ValueError, RecursionError, TypeError, KeyError):
            await self.app(scope, receive, send)  # it says what is wrong
            return
        env = next((env for env in self._envs() if env["registered_id"] == number), None)
        if env is None:
            await send_json(send, 404, {"detail": f"environment {ascii(number)[:40]} has not registered"})
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(HOLD_S):
                while self._has_enough(env):
                    self._taken.clear()
                    await self._taken.wait()

        def shared(content: Json) -> Json:
            return {**content, "queue_size": self._seen_by(env) // max(1, env["group_size"])}

        await _changed(self.app, scope, receive, send, shared)

    def _has_enough(self, env: Json) -> bool:
        """Whether an environment is to begin no more groups. One with an allocation of its own decides by itself."""
        batch = getattr(self.state, "batchsize", -1)
        return batch >= 1 and env.get("min_batch_allocation") is None and self._seen_by(env) >= self.most_asked * batch

    def _seen_by(self, env: Json) -> int:
        """Rollouts that wait, as an environment is told."""
        if self.shares.expected > 1:
            return self.shares.seen_by(env["registered_id"], self._queue(), self._envs())
        return sum(len(group["tokens"]) for group in self._queue())

    def _is_full(self) -> bool:
        self._arrange()
        formed = getattr(self.state, "curr_batch", [])
        rollouts = sum(len(group["tokens"]) for group in self._queue())
        return bool(formed) or 0 < getattr(self.state, "batchsize", -1) <= rollouts

    def report(self) -> Json:
        queued = collections.Counter(len(group["tokens"]) for group in self._queue())
        self._arrange()
        waiting = [group for groups in getattr(self.state, "buffer", {}).values() for group in groups]
        return {
            "turn": self.shares.turn(self._envs()),
            "registered": len(self._envs()),
            **{key: self.counts[key] for key in ("received", "refused", "dropped")},
            "refusal": self.refusal,
            "queue_size": len(self._queue()),
            "queued": dict(queued),
            "buffered": dict(collections.Counter(len(group["tokens"]) for group in waiting)),
            "formed": len(getattr(self.state, "curr_batch", [])),
            "batch_size": getattr(self.state, "batchsize", -1),
            "current_step": getattr(self.state, "status_dict", {}).get("step", 0),
        }

    async def _take(self, scope: Any, receive: Any, send: Any) -> None:
        body = await read(receive)
        try:
            groups = json.loads(body)
        except (ValueError, RecursionError):
            groups = None
        groups = groups if isinstance(groups, list) else [groups]
        sound = [group for group in groups if not self._refuse(group)]
        if groups and not sound:
            await send_json(send, 422, {"detail": self.refusal})
        elif getattr(self.state, "batchsize", -1) < 1:
            await send_json(send, 503, {"detail": "no trainer has registered yet"})
        else:
            if len(sound) < len(groups):
                body = json.dumps(sound).encode()
            await self._deliver(scope, receive, send, body, sound)

    def _refuse(self, group: Any) -> bool:
        """Count a group that cannot be trained on, keep the reason, and return whether it is one."""
        reason = find_fault(group) or find_unwritable_value(group)
        if reason:
            self._count_refused(1, reason)
        return reason is not None

    def _count_refused(self, groups: int, reason: str) -> None:
        self.counts["refused"] += groups
        self.refusal = reason

    async def _deliver(self, scope: Any, receive: Any, send: Any, body: bytes, groups: list[Any]) -> None:
        """Give sound groups to the API, and count what it refuses itself by the types of their values."""
        held = self._held()
        status, sent, text = await self._ask_api(scope, receive, body)
        if status < 400:
            self.counts["received"] += len(groups)
            for message in sent:
                await send(message)
        elif len(groups) > 1 and self._held() == held:
            await self._deliver_each(scope, receive, send, groups)
        else:
            self._count_refused(len(groups), shorten(text, 500))
            await send_json(send, 422, {"detail": self.refusal})
            return
        self._forget_oldest()
        self._came.set()

    async def _deliver_each(self, scope: Any, receive: Any, send: Any, groups: list[Any]) -> None:
        """Give the groups of a list to the API one by one, because it refuses a list as a whole."""
        taken = 0
        for group in groups:
            status, _, text = await self._ask_api(scope, receive, json.dumps([group]).encode())
            taken += status < 400
            if status >= 400:
                self._count_refused(1, shorten(text, 500))
        self.counts["received"] += taken
        if taken:
            await send_json(send, 200, {"status": "received", "groups_processed": taken})
        else:
            await send_json(send, 422, {"detail": self.refusal})

    def _held(self) -> int:
        """Return how many groups the API holds for training."""
        buffered = getattr(self.state, "buffer", {}).values()
        return len(self._queue()) + sum(len(waiting) for waiting in buffered)

    async def _ask_api(self, scope: Any, receive: Any, body: bytes) -> tuple[int, list[Json], str]:
        """Send this body to the API and return the status, the messages and the text of its answer."""
        sent: list[Json] = []

        async def keep(message: Json) -> None:
            sent.append(message)

        try:
            await self.app(_with_length(scope, len(body)), replay_body(body, receive), keep)
            status = next(message["status"] for message in sent if message["type"] == "http.response.start")
        except Exception as error:  # a validator of the API raises whatever a wrong value leads to
            return 500, [], f"{type(error).__name__}: {error}"
        return status, sent, b"".join(message.get("body", b"") for message in sent).decode(errors="replace")

    def _forget_oldest(self) -> None:
        self._arrange()
        queue, most = self._queue(), (self.offpolicy + 1) * self.state.batchsize
        self.counts["dropped"] += self.shares.bound(most, self._envs())
        rollouts = sum(len(group["tokens"]) for group in queue)
        while rollouts > most and len(queue) > 1:
            rollouts -= len(queue.pop(0)["tokens"])
            self.counts["dropped"] += 1

    def _forget_stale(self) -> None:
        """Atropos gives the newest batch first, so the oldest one waits longest."""
        formed = getattr(self.state, "curr_batch", [])
        while len(formed) > self.offpolicy:
            self.counts["dropped"] += len(formed.pop(0))

    def _queue(self) -> list[Json]:
        return getattr(self.state, "queue", [])

    def _envs(self) -> list[Json]:
        return getattr(self.state, "envs", [])


async def _changed(app: Any, scope: Any, receive: Any, send: Any, change: Callable[[Json], Json]) -> None:
    """The application's answer, with `change` made to its JSON."""
    sent: list[Json] = []

    async def keep(message: Json) -> None:
        sent.append(message)

    await app(scope, receive, keep)
    status = next(message["status"] for message in sent if message["type"] == "http.response.start")
    body = b"".join(message.get("body", b"") for message in sent)
    if status == 200:
        await send_json(send, status, change(json.loads(body)))
    else:
        await send_json(send, status, {"detail": body.decode(errors="replace")})


def _with_length(scope: Json, length: int) -> Json:
    """Return the request's scope with the length of its new body."""
    headers = [(name, value) for name, value in scope["headers"] if name != b"content-length"]
    return {**scope, "headers": [*headers, (b"content-length", str(length).encode())]}


def _wait_s(query: bytes) -> float:
    """Of `?wait=SECONDS`; 0 without it."""
    found = parse_qs(query.decode("latin-1")).get("wait", ["0"])[0]
    return min(float(found), MOST_WAIT_S) if found.isdigit() else 0.0


async def read(receive: Any) -> bytes:
    body, more = bytearray(), True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    return bytes(body)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m lachesis.rollout_api.app", description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--offpolicy", type=int, default=3, help="batches that may wait")
    parser.add_argument("--ahead", type=int, default=0, help="batches that the trainer holds beside these")
    parser.add_argument("--environments", type=int, default=1, help="environments that share the batches")
    args = parser.parse_args()
    import uvicorn
    from atroposlib.api.server import app

    bounded = Bounded(app, offpolicy=max(1, args.offpolicy), ahead=args.ahead, environments=args.environments)
    guarded = HttpGuard(bounded, host=HOST, token=None, max_body_bytes=MOST_BYTES)
    # told to end, it leaves who waits for a batch: the environment gives up an API whose socket is closed within two seconds
    uvicorn.run(guarded, host=HOST, port=args.port, timeout_graceful_shutdown=1)  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
