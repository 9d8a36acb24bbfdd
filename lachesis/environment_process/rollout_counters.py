"""Count what an environment requests, produces and waits for, and write the counts to a file.

Atropos reports none of this: an environment that raises in every group, or waits for a model that
does not respond, looks like one that works. Methods of the environment's class and of Atropos'
servers are wrapped. A group with a score that is not a finite number is discarded, because the API
would lose the whole batch with it.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import json
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lachesis.base.json_text import Json
from lachesis.base.reward_values import is_score
from lachesis.environment_process.request_counters import failed_requests
from lachesis.environment_toolkit.failure_reasons import (
    count_reason,
    describe_exception,
    is_endpoint_error,
    sanitize_reason,
)

if TYPE_CHECKING:
    from atroposlib.envs.base import BaseEnv, Item, ScoredDataGroup

MAX_ERROR_KINDS, MAX_ZERO_REASONS = 5, 20
EMPTY_GROUP_MESSAGE = (
    "the environment returned no group, without an error; environments that drop groups with equal "
    "rewards do so when the model solves all of them or none"
)
GROUP_KEYS = ("rollouts", "requests", "prompt_tokens", "sampled_tokens", "completions", "truncated")
# Makes one group and returns it with the items that it leaves to be worked on.
CollectGroup = Callable[[], Awaitable[tuple[Any, list[Any]]]]


class RolloutCounters:
    """Count the work of this process, and write the counts to `file` at each group.

    In a run they are written every two seconds too; see
    `lachesis.environment_process.event_loop_watch`.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        # If this is a list, the tokens and seconds of each usable group are added to it. This works
        # only for groups that run one after the other.
        self.per_group: list[Json] | None = None
        self.failure: Json | None = None
        self.counts: dict[str, float] = dict.fromkeys(
            (
                "items",
                "groups",
                "empty_groups",
                "failed_groups",
                "rollouts",
                "invalid_rollouts",
                "dropped_rollouts",
                "requests",
                "failed_requests",
                "lost_requests",
                "prompt_tokens",
                "completions",
                "sampled_tokens",
                "truncated",
                "sampling_s",
                "eval_blocked_s",
            ),
            0,
        )
        # Number of failures of each kind, by an example.
        self.errors: dict[str, int] = {}
        # Number of zero rewards for each reason that the environment gives.
        self.zero_reasons: dict[str, int] = {}
        self.in_progress: dict[str, dict[int, float]] = {"item": {}, "group": {}, "request": {}}
        self.last_group_at: float | None = None
        # Items that this process passes over, because training has seen them before a resume.
        self.num_items_before = 0
        # Number of all items, if `get_next_item` has returned None instead of a further one.
        self.num_items_used_up: int | None = None

    def snapshot(self) -> Json:
        """Return all counts as they are written to the file of the environment's counters.

        `in_*` is the number of operations in progress, and `*_since` when the oldest of them began,
        in seconds since the epoch.
        """
        in_progress_counts = {
            f"in_{kind}": len(start_times) for kind, start_times in self.in_progress.items()
        }
        oldest_start_times = {
            f"{kind}_since": min(start_times.values(), default=None)
            for kind, start_times in self.in_progress.items()
        }
        process_fields: Json = {
            "errors": self.errors,
            "zero_reasons": self.zero_reasons,
            "last_group_at": self.last_group_at,
            "items_used_up": self.num_items_used_up,
            "pid": os.getpid(),
            "written_at": time.time(),
        }
        if self.per_group is not None:
            process_fields |= {"per_group": self.per_group, "failure": self.failure}
        return {**self.counts, **in_progress_counts, **oldest_start_times, **process_fields}

    def append_group(self, counts_before: dict[str, float], seconds: float) -> None:
        """Add what a group has taken to `per_group`, if that is a list."""
        if self.per_group is None:
            return
        group_counts = {key: self.counts[key] - counts_before[key] for key in GROUP_KEYS}
        self.per_group.append({**group_counts, "seconds": round(seconds, 3)})

    def write(self) -> None:
        """Replace the file with the current counts."""
        temporary = self.file.with_name(f".{self.file.name}.part")
        with contextlib.suppress(OSError):  # A full disk must not end an environment.
            temporary.write_text(json.dumps(self.snapshot()))
            os.replace(temporary, self.file)

    def count_error(self, error: str) -> None:
        """Count a failure by its kind; see `lachesis.environment_toolkit.failure_reasons`."""
        count_reason(self.errors, sanitize_reason(error), max_kinds=MAX_ERROR_KINDS)

    def count_exception(self, error: BaseException, *, prefix: str = "") -> None:
        """Count an exception, or the reasons of all rollouts if it holds them."""
        for reason in getattr(error, "rollout_reasons", None) or [
            prefix + describe_exception(error)
        ]:
            self.count_error(reason)

    @contextlib.contextmanager
    def track_in_progress(self, kind: str) -> Any:
        """Return a context manager that marks an operation as in progress."""
        key = object()
        self.in_progress[kind][id(key)] = time.time()
        try:
            yield
        finally:
            del self.in_progress[kind][id(key)]


def install_rollout_counters(
    counters: RolloutCounters, cls: type[BaseEnv], *, max_unusable_groups: int | None = None
) -> None:
    """Wrap the methods of an environment's class to count its items and groups.

    Without `max_unusable_groups` exceptions propagate. With it an exception makes a group unusable,
    and after that many unusable groups in a row the process ends: successfully if there were usable
    groups before and none raised, because the items are used up, else with an error.
    """
    get_item, collect = cls.get_next_item, cls.collect_trajectories
    work_counter = _WorkCounter(counters, max_unusable_groups)

    @functools.wraps(get_item)
    async def get_next_item(self: BaseEnv) -> Any:
        return await work_counter.count_item(lambda: get_item(self))

    @functools.wraps(collect)
    async def collect_trajectories(self: BaseEnv, item: Item) -> Any:
        return await work_counter.count_group(lambda: collect(self, item), self.config.group_size)

    cls.get_next_item, cls.collect_trajectories = get_next_item, collect_trajectories
    _install_dropped_counter(counters, cls)


class _WorkCounter:
    """Count the items and groups of an environment, and notice when it makes no usable ones."""

    def __init__(self, counters: RolloutCounters, max_unusable_groups: int | None) -> None:
        self.counters, self.max_unusable_groups = counters, max_unusable_groups
        self.num_unusable_in_a_row = 0
        self.is_exhausted = False

    async def count_item(self, get_item: Callable[[], Awaitable[Any]]) -> Any:
        """Get an item and count it; return None once the items are used up."""
        counters = self.counters
        if self.is_exhausted:
            return None
        try:
            with counters.track_in_progress("item"):
                item = await get_item()
        except Exception as error:
            counters.count_exception(error, prefix="get_next_item() raised ")
            if self.max_unusable_groups is None or not counters.counts["items"]:
                raise
            return None  # A data set that ends with an exception has fewer items than the test.
        counters.counts["items"] += item is not None
        num_items = counters.num_items_before + int(counters.counts["items"])
        counters.num_items_used_up = num_items if item is None else None
        return item

    async def count_group(self, collect: CollectGroup, group_size: int) -> tuple[Any, list[Any]]:
        """Make a group, count it, and return the result of `collect` without unusable rollouts.

        Raises:
            RuntimeError: Too many groups in a row were unusable.
        """
        counters = self.counters
        group: Any = None
        backlog: list[Any] = []
        problem: Exception | str | None = None
        counts_before, started = dict(counters.counts), time.monotonic()
        failed_requests.set([])
        try:
            with counters.track_in_progress("group"):
                group, backlog = await collect()
        except Exception as error:
            problem = error
            counters.counts["failed_groups"] += 1
            # An endpoint that fails is no property of the item, so the test must not go on.
            if self.max_unusable_groups is None or is_endpoint_error(error):
                counters.count_exception(error)
                counters.write()
                raise
        problem = problem or _find_failed_request(group)
        group = _count_group(counters, group, problem, group_size)
        if group:
            counters.append_group(counts_before, time.monotonic() - started)
        counters.write()
        self._check_usable(has_group=bool(group))
        return group, backlog

    def _check_usable(self, *, has_group: bool) -> None:
        """End or refuse an environment after too many items in a row without a usable group."""
        self.num_unusable_in_a_row = 0 if has_group else self.num_unusable_in_a_row + 1
        if self.max_unusable_groups is None:
            return
        if self.num_unusable_in_a_row < self.max_unusable_groups:
            return
        errors = self.counters.errors
        if errors or not self.counters.counts["groups"]:
            raise RuntimeError(
                f"no usable group {self.num_unusable_in_a_row} times in a row: "
                f"{'; '.join(errors) or EMPTY_GROUP_MESSAGE}"
            )
        self.is_exhausted = True


def _find_failed_request(group: object) -> str | None:
    """Return the fault of a group that was scored although a request for it had failed."""
    if not group:
        return None
    request_failures = failed_requests.get([])
    # Rollouts that the environment has marked as invalid account for their own failed requests.
    if len(request_failures) <= len(_list_marked_reasons(group, "invalid")):
        return None
    return (
        "the environment scored a group although a request for samples had failed: "
        f"{request_failures[0]}"
    )


def _install_dropped_counter(counters: RolloutCounters, cls: type[BaseEnv]) -> None:
    """Count the groups that Atropos drops: too long, of another size, or without a signal."""
    handle_send, send = cls.handle_send_to_api, cls._send_scored_data_to_api
    sent_sizes: contextvars.ContextVar[list[int]] = contextvars.ContextVar("sent")

    @functools.wraps(handle_send)
    async def handle_send_to_api(
        self: BaseEnv, scored_data: ScoredDataGroup, *values: object, **options: object
    ) -> Any:
        """Send groups, and count the rollouts that the environment leaves out."""
        token = sent_sizes.set([])
        try:
            return await handle_send(self, scored_data, *values, **options)
        finally:
            counters.counts["dropped_rollouts"] += max(
                0, _count_rollouts(scored_data) - sum(sent_sizes.get())
            )
            sent_sizes.reset(token)

    @functools.wraps(send)
    async def _send_scored_data_to_api(self: BaseEnv, scored_data: ScoredDataGroup) -> Any:
        response = await send(self, scored_data)
        sent_sizes.get([]).append(_count_rollouts(scored_data))
        return response

    cls.handle_send_to_api, cls._send_scored_data_to_api = (
        handle_send_to_api,
        _send_scored_data_to_api,
    )


def _count_rollouts(scored_data: ScoredDataGroup) -> int:
    if isinstance(scored_data, list):
        groups = scored_data
    else:
        groups = [scored_data]
    return sum(len(group["scores"]) for group in groups if group)


def _count_group(
    counters: RolloutCounters,
    group: ScoredDataGroup,
    problem: Exception | str | None,
    group_size: int,
) -> Any:
    """Count a group, and return it or None if it cannot be used.

    A group that the environment drops itself, as is usual for equal rewards, has no signal but is
    not a fault.
    """
    if problem is not None:
        counters.counts["invalid_rollouts"] += group_size
        if isinstance(problem, Exception):
            counters.count_exception(problem)
        else:
            counters.count_error(problem)
        return None
    if not group:
        counters.counts["empty_groups"] += 1
        counters.counts["dropped_rollouts"] += group_size
        return None
    # Atropos accepts one group or a list of them.
    groups = group if isinstance(group, list) else [group]
    invalid_scores = [
        score for subgroup in groups for score in subgroup["scores"] if not is_score(score)
    ]
    rollouts = sum(len(subgroup["scores"]) for subgroup in groups)
    for reason in _list_marked_reasons(group, "invalid"):
        counters.count_error(reason)
    for reason in _list_marked_reasons(group, "zero"):
        count_reason(counters.zero_reasons, reason[:120], max_kinds=MAX_ZERO_REASONS)
    if invalid_scores:
        counters.counts["invalid_rollouts"] += rollouts
        counters.count_error(f"a score is {invalid_scores[0]!r}, which is not a finite number")
        return None
    counters.counts["groups"] += len(groups)
    counters.counts["invalid_rollouts"] += len(_list_marked_reasons(group, "invalid"))
    counters.counts["rollouts"] += rollouts - len(_list_marked_reasons(group, "invalid"))
    counters.last_group_at = time.time()
    return group


def _list_marked_reasons(group: ScoredDataGroup, name: str) -> list[str]:
    """Return the reasons that the environment has set; see `environment_toolkit.rollout`."""
    groups = group if isinstance(group, list) else [group]
    overrides = [
        override
        for subgroup in groups
        for override in subgroup.get("overrides") or ()
        if isinstance(override, dict)
    ]
    return [str(override[name]) for override in overrides if override.get(name)]
