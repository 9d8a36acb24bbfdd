"""Track how many items an environment has used, so that a resumed run continues after them.

`position.txt` has one line per sent group, in order: the number of items that were finished by
then. A checkpoint holds the number of groups that training had received, and thereby the line that
counts. A resumed environment yields its items as at the start of the run and skips that many;
queued items and those in progress are sampled again from the newer weights. An environment with
checkpoints of its own (Atropos' `save_checkpoint`) uses those; one with a method `seek(position)`
is given the number.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import logging
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from atroposlib.envs.base import BaseEnv, ScoredDataGroup

log = logging.getLogger(__name__)
# Length of a line, so that a group's line is found without reading the others.
LINE_BYTES = 12
MAX_SKIP_S = 120.0


class DatasetPosition:
    """Track the position, from the groups that training had at the run's checkpoint."""

    def __init__(self, file: Path, groups: int) -> None:
        self.file = file
        self.items_to_skip = self.items_done = self._rewind(groups)
        self.items_given = self.items_done

    def record_sent_groups(self, groups: int) -> None:
        """Record that this many groups of one item were sent."""
        line = f"{min(self.items_done, self.items_given):{LINE_BYTES - 1}d}\n"
        with self.file.open("a", encoding="ascii") as file:
            file.write(line * groups)

    def _rewind(self, groups: int) -> int:
        """Forget the items sent after these groups; return how many were finished by then."""
        if groups == 0 or not self.file.is_file():
            self.file.unlink(missing_ok=True)
            return 0
        with self.file.open("r+b") as file:
            num_lines = self.file.stat().st_size // LINE_BYTES
            file.truncate(min(groups, num_lines) * LINE_BYTES)
            file.seek(max(0, min(groups, num_lines) - 1) * LINE_BYTES)
            line = file.read(LINE_BYTES)
        if line.strip().isdigit():
            return int(line)
        log.warning("%s is damaged: the environment starts again with its first item", self.file)
        self.file.unlink()
        return 0


def install_position_tracking(position: DatasetPosition, cls: type[BaseEnv]) -> None:
    """Skip the finished items, and track the position from there."""
    if _has_own_checkpoints(cls):
        _fall_back_to_earlier_checkpoint(cls)
        position.items_to_skip = 0
    _install_item_tracking(position, cls)
    _install_group_tracking(position, cls)


def _install_item_tracking(position: DatasetPosition, cls: type[BaseEnv]) -> None:
    """Let a resumed environment pass over the items that training has seen."""
    get_item = cls.get_next_item

    @functools.wraps(get_item)
    async def get_next_item(self: BaseEnv) -> Any:
        """Return the next item; the first call passes over items that training has seen."""
        skip, position.items_to_skip = position.items_to_skip, 0
        if skip:
            try:
                if hasattr(self, "seek"):
                    self.seek(skip)
                else:
                    async with asyncio.timeout(MAX_SKIP_S):
                        for _ in range(skip):
                            await get_item(self)
                log.info("resumed: %d items that training has seen are passed over", skip)
            except Exception as error:
                log.warning(
                    "not all of the %d items that training has seen are passed over: %r",
                    skip,
                    error,
                )
        item = await get_item(self)
        position.items_given += item is not None
        return item

    cls.get_next_item = get_next_item


def _install_group_tracking(position: DatasetPosition, cls: type[BaseEnv]) -> None:
    """Count an item as finished when its groups are sent, or when it ends without any."""
    handle, send = cls.handle_env, cls._send_scored_data_to_api
    done_flag: contextvars.ContextVar[list[bool]] = contextvars.ContextVar("counted")

    @functools.wraps(handle)
    async def handle_env(self: BaseEnv, *values: object, **options: object) -> Any:
        """Handle an item, and count it as done unless it was cancelled."""
        flag: list[bool] = []
        token = done_flag.set(flag)
        try:
            result = await handle(self, *values, **options)
        finally:
            done_flag.reset(token)
        position.items_done += not flag  # After a cancellation the item is used again.
        return result

    @functools.wraps(send)
    async def _send_scored_data_to_api(self: BaseEnv, scored_data: ScoredDataGroup) -> Any:
        response = await send(self, scored_data)
        flag = done_flag.get([])
        position.items_done += not flag
        flag.append(True)
        position.record_sent_groups(len(scored_data) if isinstance(scored_data, list) else 1)
        return response

    cls.handle_env, cls._send_scored_data_to_api = handle_env, _send_scored_data_to_api


def _has_own_checkpoints(cls: type[BaseEnv]) -> bool:
    from atroposlib.envs.base import BaseEnv

    has_own_methods = any(
        getattr(cls, name) is not getattr(BaseEnv, name)
        for name in ("save_checkpoint", "load_checkpoint")
    )
    return has_own_methods and not hasattr(cls, "seek")


def _fall_back_to_earlier_checkpoint(cls: type[BaseEnv]) -> None:
    """Let Atropos load the newest checkpoint before the step at which training begins.

    Atropos loads the file of exactly that step and silently nothing else, but writes one only every
    `save_checkpoint_interval` steps.
    """
    load = cls.load_checkpoint

    @functools.wraps(load)
    def load_checkpoint(self: BaseEnv) -> Any:
        """Load the newest checkpoint of the environment's own at or before the current step."""
        folder = Path(self.checkpoint_dir) / "env_checkpoints" / str(self.wandb_prepend)
        files_by_step = {
            int(match[1]): file
            for file in folder.glob("step-*.json")
            if (match := re.fullmatch(r"step-(\d+)", file.stem))
        }
        nearest_step = max((step for step in files_by_step if step <= self.curr_step), default=None)
        if nearest_step is not None and nearest_step != self.curr_step:
            shutil.copyfile(files_by_step[nearest_step], folder / f"step-{self.curr_step}.json")
        log.info(
            "resumed: the environment's own checkpoint is of step %s",
            nearest_step if nearest_step is not None else "none",
        )
        return load(self)

    cls.load_checkpoint = load_checkpoint
