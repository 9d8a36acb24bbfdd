"""End a flow run in a state whose message is the sentence that its reader needs.

Prefect logs a traceback of every failed or cancelled state that a flow returns. Here the state is
set first, and the flow then ends by the exception that leaves a state as it is.
"""

from __future__ import annotations

from typing import Any

from prefect import runtime
from prefect.client.schemas.objects import State
from prefect.exceptions import Pause

from lachesis.base.errors import LachesisError, ServerDownError
from lachesis.prefect_client.resources import PrefectApi
from lachesis.prefect_client.runs_from_prefect import describe_refusal


def make_refusal(error: LachesisError) -> State[Any]:
    """Return the state of a flow run that is refused or skipped; its message is that of the
    error.
    """
    return State.model_validate(describe_refusal(error))


def end_flow_run(state: State[Any], *, force: bool = False) -> State[Any]:
    """Set the final state of this flow run and leave the flow.

    Args:
        state: The state.
        force: Whether the rules of the server are overruled, such as retries of a failed run.

    Returns:
        The state, for the flow to return, when the server does not respond.

    Raises:
        Pause: The state was set.
    """
    flow_run_id = runtime.flow_run.id
    if flow_run_id is None:
        return state
    content = {"type": state.type.value, "name": state.name, "message": state.message}
    try:
        new_state = PrefectApi().set_state(flow_run_id, content, force=force)
    except ServerDownError:
        return state
    raise Pause(state.message, state=State.model_validate(new_state))
