"""The table of tools as a plugin of Hermes Agent: it loads this module by the entry point group `hermes_agent.plugins` and
calls `register(ctx)`. The tools stand in the toolset `rl`.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from typing import Any

from lachesis.agent.resources import has_skill, skill_file
from lachesis.agent.session import default_profile
from lachesis.agent.session_store import NAME
from lachesis.agent.tools import TABLE, Tool, check_rl_api_keys
from lachesis.config.run_config import PROFILES

TOOLSET = "rl"


def register(ctx: Any) -> None:
    """Register every tool, and the skill where Hermes takes skills. The profile's keys are named for display; what hides the
    tools is `check_rl_api_keys` alone, so the keyless profile needs none."""
    profile = PROFILES.get(default_profile())
    for tool in TABLE.values():
        ctx.register_tool(
            name=tool.name,
            toolset=TOOLSET,
            schema={"name": tool.name, "description": tool.description, "parameters": tool.input_schema},
            handler=handler(tool),
            check_fn=check_rl_api_keys,
            requires_env=list(profile.required_keys) if profile else [],
            description=tool.description.splitlines()[0],
        )
    if hasattr(ctx, "register_skill") and has_skill():
        ctx.register_skill("rl-training", skill_file())


def handler(tool: Tool) -> Callable[..., str]:
    """A function of Hermes' form: a dict of arguments in, a JSON text out; it never raises."""

    def handle(args: dict[str, Any] | None = None, **context: Any) -> str:
        return tool.text(session_name(context), args)

    return handle


def session_name(context: dict[str, Any]) -> str:
    """`$LACHESIS_SESSION`, else Hermes' own session, else one for all."""
    named = os.environ.get("LACHESIS_SESSION")
    if named:
        return named
    asked = context.get("session_id")
    if not asked:
        return "hermes"
    name = f"hermes-{asked}"
    return name if NAME.fullmatch(name) else f"hermes-{hashlib.sha256(name.encode(errors='replace')).hexdigest()[:16]}"
