"""Offer the tools as a plugin of Hermes Agent.

Hermes loads this module through the entry point group `hermes_agent.plugins` and calls
`register(ctx)`. The tools form the toolset `rl`.
"""

import hashlib
import os
from collections.abc import Callable
from typing import Any

from lachesis.agent_tools.health_check import find_skill
from lachesis.agent_tools.session import SESSION_NAME
from lachesis.agent_tools.tools import TOOLS, AgentTool, check_rl_api_keys
from lachesis.config.installation_settings import get_default_profile
from lachesis.config.profiles import PROFILES

TOOLSET = "rl"


def register(ctx: Any) -> None:
    """Register every tool, and the skill if this version of Hermes accepts skills.

    The profile's keys are listed for display only. `check_rl_api_keys` alone decides whether the
    tools are visible, so the embedded profile needs no keys.
    """
    profile = PROFILES.get(get_default_profile())
    for tool in TOOLS.values():
        ctx.register_tool(
            name=tool.name,
            toolset=TOOLSET,
            schema={
                "name": tool.name,
                "description": tool.description,
                "parameters": tool.input_schema,
            },
            handler=make_handler(tool),
            check_fn=check_rl_api_keys,
            requires_env=list(profile.required_keys) if profile else [],
            description=tool.description.splitlines()[0],
        )
    if hasattr(ctx, "register_skill") and (skill := find_skill()):
        ctx.register_skill("rl-training", skill)


def make_handler(tool: AgentTool) -> Callable[..., str]:
    """Return a handler as Hermes calls it: it takes a dict, returns JSON text, and never raises."""

    def handle(args: dict[str, Any] | None = None, **context: object) -> str:
        return tool.run_as_text(choose_session_name(context), args)

    return handle


def choose_session_name(context: dict[str, Any]) -> str:
    """Return `$LACHESIS_SESSION`, else a name made from Hermes' session, else "hermes"."""
    configured_name = os.environ.get("LACHESIS_SESSION")
    if configured_name:
        return configured_name
    hermes_session_id = context.get("session_id")
    if not hermes_session_id:
        return "hermes"
    name = f"hermes-{hermes_session_id}"
    if SESSION_NAME.fullmatch(name):
        return name
    return f"hermes-{hashlib.sha256(name.encode(errors='replace')).hexdigest()[:16]}"
