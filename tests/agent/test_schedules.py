"""An agent schedules its draft; tests/orchestration makes schedules at a real server."""

from __future__ import annotations

from collections.abc import Callable

from lachesis.agent.registry import CallContext
from lachesis.agent.session import AgentSession
from lachesis.agent.tools import TOOLS
from lachesis.base.json_text import Json

Ask = Callable[..., Json]


def test_rl_schedule_training(ask: Ask) -> None:
    """It needs a draft, one of two arguments, and a server."""
    cron = "0 2 * * *"
    assert ask("rl_schedule_training", cron=cron)["code"] == "run_state"
    ask("rl_select_environment", name="arithmetic")
    assert "either cron" in ask("rl_schedule_training")["error"]
    assert ask("rl_schedule_training", cron=cron, remove="nights")["code"] == "arguments"
    assert ask("rl_schedule_training", cron=cron)["code"] == "server_down"
    assert ask("rl_schedule_training", remove="nights")["code"] == "server_down"


def test_rl_list_schedules(ask: Ask) -> None:
    assert ask("rl_list_schedules")["code"] == "server_down"


def test_a_schedule_that_may_cost_money_is_confirmed(ask: Ask, desk: AgentSession) -> None:
    ask("rl_select_environment", name="arithmetic", profile="tinker")
    answer, error = TOOLS["rl_schedule_training"].run_safely(
        CallContext(desk), {"cron": "0 2 * * *"}, preview=True
    )
    assert error is None
    assert answer["confirmation_required"] is True
    assert "may cost money" in answer["message"]
