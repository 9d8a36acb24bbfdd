"""Notice when an environment's event loop is blocked, and record the line at which it stands.

An environment whose method computes without an `await` lets nothing else of its process go on: no
request, no other group, no heartbeat. The counts of the environment are written from the event loop
(see `lachesis.environment_process.rollout_counters`), so an old file means a blocked loop. A thread
writes the stack of the loop to a file while that lasts; `lachesis.runs.environment_counters` reads
it.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import functools
import itertools
import os
import threading
import time
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING

from lachesis.environment_process.rollout_counters import RolloutCounters

if TYPE_CHECKING:
    from atroposlib.envs.base import BaseEnv

BEAT_INTERVAL_S = 0.5
BEATS_PER_WRITE = 4
# A beat that is later than this counts as a blocked loop. A busy machine is late by less.
MAX_BEAT_DELAY_S = 1.0
# Seconds without a beat after which the stack is written.
STACK_AFTER_S = 5.0
# After this long the interpreter itself writes the stack: the thread does not run, because a call
# such as a regular expression holds the interpreter's lock.
LOCKED_AFTER_S = 10.0
WATCH_INTERVAL_S = 1.0
REWRITE_AFTER_S = 10.0


class LoopWatch:
    """Watch the event loop of this process, which runs in the thread that makes this object.

    Args:
        counters: Written at each beat.
        stack_file: Holds the number of the loop's thread and the environment's folder, and below
            the stacks of all threads while the loop is blocked.
        environment_folder: The folder of the environment's file.
    """

    def __init__(
        self, counters: RolloutCounters, stack_file: Path, environment_folder: Path
    ) -> None:
        self.counters = counters
        self.blocked_s = 0.0
        """Seconds for which the loop was blocked since this process began."""
        self._last_beat_at = time.monotonic()
        self._written_at: float | None = None
        header = f"{threading.get_ident():#018x} {environment_folder}\n".encode()
        self._header_size = len(header)
        self._stack_file = _create_file(stack_file, header)
        counters.write()
        threading.Thread(target=self._watch, name="loop watch", daemon=True).start()

    def install(self, cls: type[BaseEnv]) -> None:
        """Note a sign of life again and again while the environment class makes rollouts."""
        manage = cls.env_manager

        @functools.wraps(manage)
        async def env_manager(env: BaseEnv) -> None:
            task = asyncio.create_task(self._beat())
            try:
                await manage(env)
            finally:
                task.cancel()

        cls.env_manager = env_manager

    @contextlib.contextmanager
    def count_evaluation(self) -> Iterator[None]:
        """Add the seconds for which the loop is blocked during the block to `eval_blocked_s`."""
        self._record_beat()
        blocked_before_s = self.blocked_s
        try:
            yield
        finally:
            self._record_beat()
            self.counters.counts["eval_blocked_s"] += round(self.blocked_s - blocked_before_s, 3)
            self.counters.write()

    async def _beat(self) -> None:
        for count in itertools.count():
            self._record_beat()
            if count % BEATS_PER_WRITE == 0:
                self.counters.write()
            await asyncio.sleep(BEAT_INTERVAL_S)

    def _record_beat(self) -> None:
        now = time.monotonic()
        delay_s = now - self._last_beat_at - BEAT_INTERVAL_S
        if delay_s > MAX_BEAT_DELAY_S:
            self.blocked_s += delay_s
        self._last_beat_at = now

    def _watch(self) -> None:
        while True:
            with contextlib.suppress(OSError, ValueError):  # A full disk must not end it.
                faulthandler.dump_traceback_later(LOCKED_AFTER_S, file=self._stack_file)
                self._update_stack()
            time.sleep(WATCH_INTERVAL_S)

    def _update_stack(self) -> None:
        """Write the stacks while the loop is blocked, and clear them afterwards."""
        now = time.monotonic()
        if now - self._last_beat_at <= STACK_AFTER_S:
            self._clear_stack()
            self._written_at = None
        elif self._written_at is None or now - self._written_at > REWRITE_AFTER_S:
            self._clear_stack()
            faulthandler.dump_traceback(self._stack_file, all_threads=True)
            self._written_at = now

    def _clear_stack(self) -> None:
        if os.fstat(self._stack_file.fileno()).st_size > self._header_size:
            self._stack_file.truncate(self._header_size)
            self._stack_file.seek(self._header_size)


def _create_file(file: Path, content: bytes) -> FileIO:
    """Create a file with this content; on a full disk return one that takes no content."""
    try:
        opened = FileIO(file, "w")
        opened.write(content)
        return opened
    except OSError:
        return FileIO(os.devnull, "w")
