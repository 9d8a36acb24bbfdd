"""Answer an agent's question about the rollouts of a run."""

from __future__ import annotations

from typing import Any, Literal

from lachesis.agent_tools.draft import AgentSession
from lachesis.base.json_text import ResponseModel
from lachesis.rollouts.search import RolloutQuery, describe_found, find_rollouts

# An answer holds at most so many characters of each text.
MAX_TEXT_CHARACTERS = 2000


class RolloutList(ResponseModel):
    """The rollouts of a run that a query asks for."""

    run_id: str
    message: str
    """How many match, and of which steps they are kept."""
    rollouts: list[dict[str, Any]]


def get_rollouts(
    session: AgentSession,
    run_id: str,
    step: int | None,
    order: Literal["worst", "best", "first", "invalid"],
    item: str | None,
    limit: int,
) -> RolloutList:
    """Return rollouts of a run; the arguments are those of `lachesis.rollouts.search.RolloutQuery`.

    Raises:
        LachesisError: There is no such run, or the query is not allowed.
    """
    record = session.store.load(run_id)
    if order == "invalid":
        query = RolloutQuery(step=step, invalid=True, item=item, limit=limit)
    else:
        query = RolloutQuery(step=step, order=order, item=item, limit=limit)
    found = find_rollouts(session.store.dir(record.run_id).rollouts, query)
    return RolloutList(
        run_id=record.run_id,
        message=describe_found(found),
        rollouts=[
            {
                name: value[:MAX_TEXT_CHARACTERS] if isinstance(value, str) else value
                for name, value in rollout.items()
            }
            for rollout in found.rollouts
        ],
    )
