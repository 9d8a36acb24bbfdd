"""In the child that runs an environment: what it asks, gives and waits for, counted and written to a file.

Atropos tells none of this: an environment that raises in each group, or waits for a model that does not answer, looks like one
that works. `install` counts around four methods of the environment's class and of Atropos' servers; a group with a score that
is no finite number is taken for none, as the API would lose the whole batch with it."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import json
import os
import threading
import time
from pathlib import Path
from typing import Any

from lachesis.base.failure_reasons import count_reason, describe_exception, sanitize_reason
from lachesis.base.numbers import is_score
from lachesis.environment.endpoint_errors import is_endpoint_error, is_unanswered

BEAT_S = 2.0
MOST_ERRORS, MOST_ZEROS = 5, 20
EMPTY = (
    "the environment gave no group, without an error; one that leaves out groups with equal rewards does so when the model "
    "solves all of them or none"
)
GROUP_KEYS = ("rollouts", "requests", "prompt_tokens", "sampled_tokens", "completions", "truncated")
Json = dict[str, Any]
failed_requests: contextvars.ContextVar[list[str]] = contextvars.ContextVar("failed_requests")
"""Of the group under way. An environment that takes a failure of the server for a bad answer would score it 0; such a group is
invalid instead."""

uncounted: contextvars.ContextVar[bool] = contextvars.ContextVar("uncounted", default=False)
"""Whether requests are not training's own, as those of an evaluation beside it: what they wait for is no sign of a stall."""


class Tally:
    """Counts of this process. Written whole to `file`, at each group and, with `beat`, every two seconds: a file that grows
    old is that of a process that stands still."""

    def __init__(self, file: Path, *, beat: bool = False) -> None:
        self.file = file
        self.per_group: list[Json] | None = None
        """With a list here, what each usable group took is added to it; for groups that come one after the other."""
        self.failure: Json | None = None
        self.counts: dict[str, float] = dict.fromkeys(
            ("items", "groups", "empty", "raised", "rollouts", "invalid", "dropped", "requests", "failed_requests",
             "lost_requests", "prompt_tokens", "completions", "sampled_tokens", "truncated",
             "sampling_s"), 0
        )  # fmt: skip
        self.errors: dict[str, int] = {}
        """How often each kind of failure came, by an example of it."""
        self.zeros: dict[str, int] = {}
        """Rewards of 0 whose reason the environment tells."""
        self.waiting: dict[str, dict[int, float]] = {"item": {}, "group": {}, "request": {}}
        self.group_at: float | None = None
        self._lock = threading.Lock()
        if beat:
            threading.Thread(target=self._beat, name="tally", daemon=True).start()

    def snapshot(self) -> Json:
        """`in_*` counts what is under way now, `*_since` is when the oldest of it began (seconds since 1970)."""
        now = {f"in_{kind}": len(begun) for kind, begun in self.waiting.items()}
        since = {f"{kind}_since": min(begun.values(), default=None) for kind, begun in self.waiting.items()}
        said = {"errors": self.errors, "zeros": self.zeros, "group_at": self.group_at, "pid": os.getpid(), "at": time.time()}
        detail = {"per_group": self.per_group, "failure": self.failure} if self.per_group is not None else {}
        return {**self.counts, **now, **since, **said, **detail}

    def write(self) -> None:
        temporary = self.file.with_name(f".{self.file.name}.part")
        with self._lock, contextlib.suppress(OSError):  # a full disk must not end an environment
            temporary.write_text(json.dumps(self.snapshot()))
            os.replace(temporary, self.file)

    def note(self, error: str) -> None:
        """Count what went wrong by its kind; see `lachesis.base.failure_reasons`."""
        count_reason(self.errors, sanitize_reason(error), max_kinds=MOST_ERRORS)

    def note_exception(self, error: BaseException, *, prefix: str = "") -> None:
        """Count an exception of the environment; one that holds the reason of each rollout as those reasons."""
        for reason in getattr(error, "rollout_reasons", None) or [prefix + describe_exception(error)]:
            self.note(reason)

    @contextlib.contextmanager
    def under_way(self, kind: str) -> Any:
        mark = object()
        self.waiting[kind][id(mark)] = time.time()
        try:
            yield
        finally:
            del self.waiting[kind][id(mark)]

    def _beat(self) -> None:
        while True:
            self.write()
            time.sleep(BEAT_S)


def watch_environment(tally: Tally, cls: Any, *, give_up_after: int | None = None) -> None:
    """Count what the class gives. With `give_up_after`, an exception makes a group empty, and after so many unusable groups in
    a row the process ends: as one whose items are used up when there were usable ones before and none raised, else with an
    error. Without it exceptions stay as they are."""
    get_item, collect = cls.get_next_item, cls.collect_trajectories
    row, enough = 0, False

    @functools.wraps(get_item)
    async def get_next_item(self: Any) -> Any:
        if enough:
            return None
        try:
            with tally.under_way("item"):
                item = await get_item(self)
        except Exception as error:
            tally.note_exception(error, prefix="get_next_item() raised ")
            if give_up_after is None or not tally.counts["items"]:
                raise
            return None  # a data set that ends with an exception is shorter than the test
        tally.counts["items"] += item is not None
        return item

    @functools.wraps(collect)
    async def collect_trajectories(self: Any, item: Any) -> Any:
        nonlocal row, enough
        group, backlog = None, []
        problem: Exception | str | None = None
        before, started = dict(tally.counts), time.monotonic()
        failed_requests.set([])
        try:
            with tally.under_way("group"):
                group, backlog = await collect(self, item)
        except Exception as error:
            problem = error
            tally.counts["raised"] += 1
            if give_up_after is None or is_endpoint_error(error):
                tally.note_exception(error)
                tally.write()
                raise
        if group and len(unanswered := failed_requests.get([])) > len(_marks(group, "invalid")):
            problem = f"the environment scored a group although a request for samples had failed: {unanswered[0]}"
        group = _count_group(tally, group, problem, self.config.group_size)
        row = 0 if group else row + 1
        if group and tally.per_group is not None:
            took = {key: tally.counts[key] - before[key] for key in GROUP_KEYS}
            tally.per_group.append({**took, "seconds": round(time.monotonic() - started, 3)})
        tally.write()
        if give_up_after is not None and row >= give_up_after:
            if tally.errors or not tally.counts["groups"]:
                raise RuntimeError(f"no usable group {row} times in a row: {'; '.join(tally.errors) or EMPTY}")
            enough = True
        return group, backlog

    cls.get_next_item, cls.collect_trajectories = get_next_item, collect_trajectories
    _watch_sending(tally, cls)


def _watch_sending(tally: Tally, cls: Any) -> None:
    """Atropos leaves out groups that are too long, of another size, or without a signal, and says so in a log at most."""
    offer, send = cls.handle_send_to_api, cls._send_scored_data_to_api
    sent: contextvars.ContextVar[list[int]] = contextvars.ContextVar("sent")

    @functools.wraps(offer)
    async def handle_send_to_api(self: Any, scored_data: Any, *values: Any, **options: Any) -> Any:
        token = sent.set([])
        try:
            return await offer(self, scored_data, *values, **options)
        finally:
            tally.counts["dropped"] += max(0, _rollouts(scored_data) - sum(sent.get()))
            sent.reset(token)

    @functools.wraps(send)
    async def _send_scored_data_to_api(self: Any, scored_data: Any) -> Any:
        answer = await send(self, scored_data)
        sent.get([]).append(_rollouts(scored_data))
        return answer

    cls.handle_send_to_api, cls._send_scored_data_to_api = handle_send_to_api, _send_scored_data_to_api


def _rollouts(scored_data: Any) -> int:
    groups = scored_data if isinstance(scored_data, list) else [scored_data]
    return sum(len(one["scores"]) for one in groups if one)


def _count_group(tally: Tally, group: Any, problem: Exception | str | None, group_size: int) -> Any:
    """The group, or None when it cannot be used; both are counted. One that the environment leaves out itself, as is usual for
    equal rewards, carries no signal; it is no fault."""
    if problem is not None:
        tally.counts["invalid"] += group_size
        if isinstance(problem, Exception):
            tally.note_exception(problem)
        else:
            tally.note(problem)
        return None
    if not group:
        tally.counts["empty"] += 1
        tally.counts["dropped"] += group_size
        return None
    groups = group if isinstance(group, list) else [group]
    bad = [score for one in groups for score in one["scores"] if not is_score(score)]
    rollouts = sum(len(one["scores"]) for one in groups)
    for reason in _marks(group, "invalid"):
        tally.note(reason)
    for reason in _marks(group, "zero"):
        count_reason(tally.zeros, reason[:120], max_kinds=MOST_ZEROS)
    if bad:
        tally.counts["invalid"] += rollouts
        tally.note(f"a score is {bad[0]!r}, which is no finite number")
        return None
    tally.counts["groups"] += len(groups)
    tally.counts["invalid"] += len(_marks(group, "invalid"))
    tally.counts["rollouts"] += rollouts - len(_marks(group, "invalid"))
    tally.group_at = time.time()
    return group


def _marks(group: Any, name: str) -> list[str]:
    """The reasons of rollouts that the environment itself marks so; see `lachesis.environment.outcome`."""
    groups = group if isinstance(group, list) else [group]
    marks = [mark for one in groups for mark in one.get("overrides") or () if isinstance(mark, dict)]
    return [str(mark[name]) for mark in marks if mark.get(name)]


def watch_servers(tally: Tally) -> None:
    """Count requests, tokens, and completions that were cut off.

    A failed request counts as lost too when no answer came to it. One that the server has refused,
    for what it asks, does not.
    """
    from atroposlib.envs.server_handling.server_baseline import APIServer

    for name in ("chat_completion", "completion", "tokens_and_logprobs_completion"):
        original = getattr(APIServer, name)

        @functools.wraps(original)
        async def call(self: Any, _original: Any = original, **options: Any) -> Any:
            if uncounted.get():
                return await _original(self, **options)
            started = time.monotonic()
            try:
                with tally.under_way("request"):
                    answer = await _original(self, **options)
            except Exception as error:
                tally.counts["failed_requests"] += 1
                tally.counts["lost_requests"] += is_unanswered(error)
                failed_requests.get([]).append(f"{type(error).__name__}: {error}")
                raise
            tally.counts["sampling_s"] += time.monotonic() - started
            tally.counts["requests"] += 1
            _count_answer(tally, answer)
            return answer

        setattr(APIServer, name, call)


def _count_answer(tally: Tally, answer: Any) -> None:
    if isinstance(answer, tuple):  # prompt ids, ids per completion, their logprobs, why each ended
        prompt, completions, _, reasons = answer
        lengths = (len(prompt), sum(map(len, completions)))
    else:
        reasons = [choice.finish_reason for choice in answer.choices]
        usage = getattr(answer, "usage", None)
        lengths = (getattr(usage, "prompt_tokens", 0) or 0, getattr(usage, "completion_tokens", 0) or 0)
    tally.counts["prompt_tokens"] += lengths[0]
    tally.counts["sampled_tokens"] += lengths[1]
    tally.counts["completions"] += len(reasons)
    tally.counts["truncated"] += sum(reason == "length" for reason in reasons)
