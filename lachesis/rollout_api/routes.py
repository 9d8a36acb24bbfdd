"""Run Atropos' `run-api` on loopback with guards before it, and weights for several environments.

    python -m lachesis.rollout_api.routes --port N --offpolicy K --ahead A --environments E

What would block or corrupt the API permanently is refused with a reason, and what it would store
without limit is bounded:

    groups before a trainer has registered       503, so that the environment sends them again
    groups whose lists have different lengths     422, counted as refused; other groups are kept
    groups without a finite score per rollout    422, counted as refused
    a queue of more than K + 1 batches           the oldest groups are dropped and counted
    more than K batches formed but not fetched   the oldest are dropped, and their groups counted
    another Host or Origin, 200 MB of a body     403, 413

An environment asks for the state of the queue ten times a second. While K + A batches wait, which
is the maximum, the response is delayed by up to a second, so that the next batch is begun as soon
as one is fetched. Once a trainer has registered, `GET /batch?wait=SECONDS` responds when there is a
batch, or after that time without one. `GET /counts` returns the numbers of `received`, `refused`
and `dropped` groups, the last reason of a refusal, and what a batch is waiting for: `queued` and
`buffered` rollouts by the size of their groups, `batch_size`, and the environment whose `turn` it
is while groups of others wait. The API keeps all of this in memory only. See
`lachesis.rollout_api.weighted_queue`. `GET /refused` returns the newest refused groups as
JSON texts with their reasons, each once.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import json
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

from lachesis.base.errors import shorten
from lachesis.base.http_guard import HttpGuard, replay_body, send_json
from lachesis.base.json_text import Json
from lachesis.rollout_api.asgi_messages import call_app, read_body, send_changed_answer
from lachesis.rollout_api.scored_group import find_fault, find_unwritable_value
from lachesis.rollout_api.weighted_queue import WeightedQueue

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.types import Receive, Scope, Send

HOST = "127.0.0.1"
# Maximum size of a message; 64 rollouts of 32,000 tokens with log-probabilities take about 50 MB.
MAX_BODY_BYTES = 200_000_000
MAX_WAIT_S = 30.0
# Maximum delay of a response, because environments start evaluations and checkpoints in between.
MAX_STATUS_HOLD_S = 1.0
# Refused groups that are kept until the trainer asks for them, and the characters of each.
MAX_REFUSED_GROUPS, MAX_REFUSED_CHARACTERS = 32, 200_000
SCORED_DATA_PATHS = ("/scored_data", "/scored_data_list")


class BoundedRolloutServer:
    """Wrap the API's application with guards.

    `max_waiting_batches` batches may wait beside the `num_prefetched_batches` that the trainer
    fetches ahead.
    """

    def __init__(
        self,
        app: Starlette,
        *,
        max_waiting_batches: int,
        num_prefetched_batches: int = 0,
        num_environments: int = 1,
    ) -> None:
        self.app, self.state, self.max_waiting_batches, self.max_requested_batches = (
            app,
            app.state,
            max_waiting_batches,
            max_waiting_batches + num_prefetched_batches,
        )
        self.weighted_queue = WeightedQueue(num_environments)
        self.counts: collections.Counter[str] = collections.Counter()
        self.last_refusal: str | None = None
        self.refused_groups: collections.deque[Json] = collections.deque(maxlen=MAX_REFUSED_GROUPS)
        self._groups_arrived = asyncio.Event()
        self._batch_taken = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path")
        if scope["type"] == "http" and path == "/counts":
            await send_json(send, 200, self.report_counts())
        elif scope["type"] == "http" and path == "/refused":
            refused = list(self.refused_groups)
            self.refused_groups.clear()
            await send_json(send, 200, {"refused": refused})
        elif scope["type"] == "http" and path in SCORED_DATA_PATHS:
            await self._receive_groups(scope, receive, send)
        elif scope["type"] == "http" and path == "/status-env":
            await self._answer_status(scope, receive, send)
        else:
            # The trainer resets the API before it registers, so groups of an earlier attempt are
            # forgotten.
            if path == "/reset_data":
                self.weighted_queue = WeightedQueue(self.weighted_queue.num_expected)
            if path == "/batch":
                self._arrange_queue()
                self._drop_stale_batches()
                wait_s = _parse_wait_s(scope.get("query_string", b""))
                has_trainer = getattr(self.state, "batchsize", -1) >= 1
                if wait_s and has_trainer and not self._has_batch():
                    await receive()  # The request has no body, so this reads all of it.
                    if not await self._wait_for_batch(receive, wait_s):
                        return
                    receive = replay_body(b"", receive)
            await self.app(scope, receive, send)
            # Environments whose status was delayed may begin the next batch.
            self._batch_taken.set()

    async def _wait_for_batch(self, receive: Receive, wait_s: float) -> bool:
        """Wait for a batch; return False if the client is gone and must not get it."""
        disconnect_task = asyncio.ensure_future(receive())  # The next message is the disconnect.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while not self._has_batch() and not disconnect_task.done():
                    self._groups_arrived.clear()
                    arrival_task = asyncio.ensure_future(self._groups_arrived.wait())
                    try:
                        await asyncio.wait(
                            {arrival_task, disconnect_task}, return_when=asyncio.FIRST_COMPLETED
                        )
                    finally:  # At the timeout too, or the task would wait for ever.
                        arrival_task.cancel()
        if disconnect_task.done():
            return False
        disconnect_task.cancel()
        return True

    def _arrange_queue(self) -> None:
        self.weighted_queue.arrange(self._get_queue(), self._get_environments())

    async def _answer_status(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Report the queue to an environment, once it has work to do or after a while."""
        body = await read_body(receive)
        receive = replay_body(body, receive)
        try:
            environment_id = json.loads(body)["env_id"]
        except (ValueError, RecursionError, TypeError, KeyError):
            await self.app(scope, receive, send)  # The API reports what is wrong.
            return
        env = next(
            (env for env in self._get_environments() if env["registered_id"] == environment_id),
            None,
        )
        if env is None:
            await send_json(
                send,
                404,
                {"detail": f"environment {ascii(environment_id)[:40]} has not registered"},
            )
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(MAX_STATUS_HOLD_S):
                while self._has_enough_rollouts(env):
                    self._batch_taken.clear()
                    await self._batch_taken.wait()

        def set_queue_size(content: Json) -> Json:
            return {
                **content,
                "queue_size": self._compute_queue_size(env) // max(1, env["group_size"]),
            }

        await send_changed_answer(self.app, scope, receive, send, set_queue_size)

    def _has_enough_rollouts(self, env: Json) -> bool:
        """Return whether an environment should begin no more groups.

        An environment with its own allocation decides by itself.
        """
        batch_size = getattr(self.state, "batchsize", -1)
        return (
            batch_size >= 1
            and env.get("min_batch_allocation") is None
            and self._compute_queue_size(env) >= self.max_requested_batches * batch_size
        )

    def _compute_queue_size(self, env: Json) -> int:
        """Return the number of waiting rollouts to report to an environment.

        An environment that a batch cannot be formed without sees an empty queue. Otherwise a batch
        might never be formed: an environment that was restarted may have its share of a batch in
        the queue, and is the next whose group is needed.
        """
        if self.weighted_queue.num_expected < 2:
            return sum(len(group["tokens"]) for group in self._get_queue())
        envs, env_id = self._get_environments(), env["registered_id"]
        if not self._has_batch() and self.weighted_queue.is_awaited(env_id, envs):
            return 0
        return self.weighted_queue.compute_queue_size(env_id, self._get_queue(), envs)

    def _has_batch(self) -> bool:
        self._arrange_queue()
        formed_batches = getattr(self.state, "curr_batch", [])
        num_rollouts = sum(len(group["tokens"]) for group in self._get_queue())
        return bool(formed_batches) or 0 < getattr(self.state, "batchsize", -1) <= num_rollouts

    def report_counts(self) -> Json:
        """Return the content of `GET /counts`."""
        queued_sizes = collections.Counter(len(group["tokens"]) for group in self._get_queue())
        self._arrange_queue()
        buffered_groups = [
            group for groups in getattr(self.state, "buffer", {}).values() for group in groups
        ]
        return {
            "turn": self.weighted_queue.find_awaited_environment(self._get_environments()),
            "registered": len(self._get_environments()),
            **{key: self.counts[key] for key in ("received", "refused", "dropped")},
            "refusal": self.last_refusal,
            "queue_size": len(self._get_queue()),
            "queued": dict(queued_sizes),
            "buffered": dict(
                collections.Counter(len(group["tokens"]) for group in buffered_groups)
            ),
            "formed": len(getattr(self.state, "curr_batch", [])),
            "batch_size": getattr(self.state, "batchsize", -1),
            "current_step": getattr(self.state, "status_dict", {}).get("step", 0),
        }

    async def _receive_groups(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the valid groups of a request on; a request without any is refused."""
        body = await read_body(receive)
        try:
            groups = json.loads(body)
        except (ValueError, RecursionError):
            groups = None
        groups = groups if isinstance(groups, list) else [groups]
        valid_groups = [group for group in groups if not self._refuse_if_invalid(group)]
        if groups and not valid_groups:
            await send_json(send, 422, {"detail": self.last_refusal})
        elif getattr(self.state, "batchsize", -1) < 1:
            await send_json(send, 503, {"detail": "no trainer has registered yet"})
        else:
            if len(valid_groups) < len(groups):
                body = json.dumps(valid_groups).encode()
            await self._forward_groups(scope, receive, send, body, valid_groups)

    def _refuse_if_invalid(self, group: Any) -> bool:
        """Return whether a group cannot be trained on; if so, count it and keep the reason."""
        reason = find_fault(group) or find_unwritable_value(group)
        if reason:
            self._count_refused([group], reason)
        return reason is not None

    def _count_refused(self, groups: list[Any], reason: str) -> None:
        self.counts["refused"] += len(groups)
        self.last_refusal = reason
        for group in groups:
            self.refused_groups.append({"reason": reason, "group": _write_beginning(group)})

    async def _forward_groups(
        self, scope: Scope, receive: Receive, send: Send, body: bytes, groups: list[Any]
    ) -> None:
        """Send valid groups to the API, and count those with values that it refuses."""
        # Atropos may store some groups of a list before it refuses another one. Sending such a list
        # again would store those twice.
        num_held_before = self._count_held_groups()
        status, messages, text = await call_app(self.app, scope, receive, body)
        if status < 400:
            self.counts["received"] += len(groups)
            for message in messages:
                await send(message)
        elif len(groups) > 1 and self._count_held_groups() == num_held_before:
            await self._forward_groups_singly(scope, receive, send, groups)
        else:
            self._count_refused(groups, shorten(text, 500))
            await send_json(send, 422, {"detail": self.last_refusal})
            return
        self._drop_oldest_groups()
        self._groups_arrived.set()

    async def _forward_groups_singly(
        self, scope: Scope, receive: Receive, send: Send, groups: list[Any]
    ) -> None:
        """Send the groups of a list to the API separately, because it refuses a list as a whole."""
        num_accepted = 0
        for group in groups:
            status, _, text = await call_app(self.app, scope, receive, json.dumps([group]).encode())
            num_accepted += status < 400
            if status >= 400:
                self._count_refused([group], shorten(text, 500))
        self.counts["received"] += num_accepted
        if num_accepted:
            await send_json(send, 200, {"status": "received", "groups_processed": num_accepted})
        else:
            await send_json(send, 422, {"detail": self.last_refusal})

    def _count_held_groups(self) -> int:
        """Return how many groups the API holds for training."""
        buffered = getattr(self.state, "buffer", {}).values()
        return len(self._get_queue()) + sum(len(waiting) for waiting in buffered)

    def _drop_oldest_groups(self) -> None:
        """Drop waiting groups beyond the batches that may wait and the batch being formed."""
        self._arrange_queue()
        queue, max_rollouts = (
            self._get_queue(),
            (self.max_waiting_batches + 1) * self.state.batchsize,
        )
        self.counts["dropped"] += self.weighted_queue.drop_excess(
            max_rollouts, self._get_environments()
        )
        num_rollouts = sum(len(group["tokens"]) for group in queue)
        while num_rollouts > max_rollouts and len(queue) > 1:
            num_rollouts -= len(queue.pop(0)["tokens"])
            self.counts["dropped"] += 1

    def _drop_stale_batches(self) -> None:
        """Drop the oldest formed batches until no more than `max_waiting_batches` are left.

        Atropos serves the newest first, so the oldest would wait longest.
        """
        formed_batches = getattr(self.state, "curr_batch", [])
        while len(formed_batches) > self.max_waiting_batches:
            self.counts["dropped"] += len(formed_batches.pop(0))

    def _get_queue(self) -> list[Json]:
        return getattr(self.state, "queue", [])

    def _get_environments(self) -> list[Json]:
        return getattr(self.state, "envs", [])


def _write_beginning(group: Any) -> str:
    """Return a group as JSON, cut after the first characters if it is long."""
    try:
        return json.dumps(group)[:MAX_REFUSED_CHARACTERS]
    except RecursionError:
        return "a value that is nested too deeply"


def _parse_wait_s(query: bytes) -> float:
    """Return the seconds in `?wait=SECONDS`, or 0."""
    wait_text = parse_qs(query.decode("latin-1")).get("wait", ["0"])[0]
    if wait_text.isdigit():
        return min(float(wait_text), MAX_WAIT_S)
    return 0.0


def main() -> None:
    """Serve the rollout API until SIGTERM."""
    parser = argparse.ArgumentParser(
        prog="python -m lachesis.rollout_api.routes", description=__doc__
    )
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--offpolicy", type=int, default=3, help="batches that may wait")
    parser.add_argument(
        "--ahead", type=int, default=0, help="batches that the trainer holds beside these"
    )
    parser.add_argument(
        "--environments", type=int, default=1, help="environments that share the batches"
    )
    args = parser.parse_args()
    import uvicorn
    from atroposlib.api.server import app

    from lachesis.base.http_server import ReceiveDeadlineProtocol

    bounded = BoundedRolloutServer(
        app,
        max_waiting_batches=max(1, args.offpolicy),
        num_prefetched_batches=args.ahead,
        num_environments=args.environments,
    )
    guarded = HttpGuard(bounded, host=HOST, token=None, max_body_bytes=MAX_BODY_BYTES)
    # At shutdown, open requests for a batch are dropped: an environment whose API has closed its
    # socket ends within two seconds.
    uvicorn.run(
        guarded,  # type: ignore[arg-type]
        http=ReceiveDeadlineProtocol,
        host=HOST,
        port=args.port,
        timeout_graceful_shutdown=1,
    )


if __name__ == "__main__":
    main()
