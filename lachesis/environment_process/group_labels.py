"""Send with each group the item that it was made of, so that the run's rollouts show it.

An item holds what the environment compares answers with, which says more than a score.
"""

from __future__ import annotations

import functools
import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from atroposlib.envs.base import BaseEnv, Item

MAX_CHARACTERS = 20_000


def label_groups_with_items(cls: type[BaseEnv]) -> None:
    """Wrap `collect_trajectories` of an environment's class, so that it marks its groups."""
    collect = cls.collect_trajectories

    @functools.wraps(collect)
    async def collect_trajectories(self: BaseEnv, item: Item) -> tuple[Any, list[Any]]:
        scored_data, backlog = await collect(self, item)
        text = describe_item(item)
        for group in scored_data if isinstance(scored_data, list) else [scored_data]:
            if group:
                overrides = group.get("group_overrides") or {}
                group["group_overrides"] = {**overrides, "item": text}
        return scored_data, backlog

    cls.collect_trajectories = collect_trajectories


def describe_item(item: Item) -> str:
    """Return an item as JSON; what JSON cannot hold is written as Python writes it."""
    try:
        text = json.dumps(item, ensure_ascii=False, default=repr)
    except (TypeError, ValueError, RecursionError):
        text = repr(item)
    return text[:MAX_CHARACTERS]
