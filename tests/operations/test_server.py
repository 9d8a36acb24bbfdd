"""Tools that need the Prefect server start it where none runs: once, and say so."""

import concurrent.futures
import json
import os
import sys
from typing import Any

import pytest
from mcp import Client, StdioServerParameters
from mcp.client.stdio import stdio_client

from lachesis.agent_tools.session import AgentSession
from lachesis.agent_tools.tools import TOOLS, CallContext
from lachesis.prefect_client import background_serve
from lachesis.prefect_client.serve_info import read_server_info
from tests.harness.prefect_server import give_database
from tests.harness.served_home import processes_under


@pytest.fixture
def unserved(clean_environment, empty_database, monkeypatch):
    """A home without a server, whose user has a key in Hermes' file only."""
    home = clean_environment
    monkeypatch.delenv("LACHESIS_NO_SERVE")
    monkeypatch.setenv("HERMES_HOME", str(home))
    monkeypatch.setenv("LACHESIS_PAGES_PORT", "0")
    give_database(home / "prefect", empty_database)
    (home / ".env").write_text("TINKER_API_KEY=tml-of-hermes\n")
    yield home
    background_serve.stop_server()
    assert processes_under(home) == {}


def _call(session, tool, arguments):
    texts: list[str] = []
    context = CallContext(AgentSession(session), lambda done, total, text: texts.append(text))
    return TOOLS[tool].run_safely(context, arguments)[0], texts


async def _ask_over_mcp(tool, arguments):
    """Call a tool of a real MCP server, a child that speaks over its standard streams."""
    parameters = StdioServerParameters(
        command=sys.executable,
        args=["-m", "lachesis.cli.main", "mcp", "--session", "second"],
        env=dict(os.environ),
    )
    async with Client(stdio_client(parameters)) as client:
        await client.call_tool("rl_select_environment", {"name": "arithmetic"})
        answer: Any = await client.call_tool(tool, arguments)
        return dict(json.loads(answer.content[0].text))


@pytest.mark.timeout(300)
async def test_two_agents_that_need_a_server_get_the_same_one(unserved):
    _call("first", "rl_select_environment", {"name": "arithmetic"})
    with concurrent.futures.ThreadPoolExecutor() as pool:
        first = pool.submit(_call, "first", "rl_start_training", {})
        second_answer = await _ask_over_mcp("rl_start_training", {})
    first_answer, texts = first.result()
    for answer in (first_answer, second_answer):
        _call("first", "rl_stop_training", {"run_id": answer["run_id"]})
    server_info = read_server_info()
    assert server_info is not None
    notes = [answer.get("server_started") for answer in (first_answer, second_answer)]
    assert any(notes)
    for note in filter(None, notes):
        assert server_info["ui_url"] in note
        assert "lachesis serve --stop" in note
    assert not texts or "starting one and a runner" in texts[0]
    assert server_info["key_places"] == {"TINKER_API_KEY": str(unserved / ".env")}
    health, _ = _call("first", "rl_health_check", {})
    assert health["status"] == "ok", health
    again, texts = _call("first", "rl_start_training", {})
    assert "server_started" not in again
    assert texts == []
    _call("first", "rl_stop_training", {"run_id": again["run_id"]})


def test_nothing_is_started_for_a_call_that_is_refused(unserved):
    health, _ = _call("first", "rl_health_check", {})
    assert health["status"] == "ok"
    assert "the first tool that needs one starts it" in health["note"]
    answer, texts = _call("first", "rl_start_training", {})
    assert answer["code"] == "run_state"
    assert texts == []
    assert read_server_info() is None


def test_a_start_can_be_forbidden(unserved, monkeypatch):
    monkeypatch.setenv("LACHESIS_NO_SERVE", "1")
    _call("first", "rl_select_environment", {"name": "arithmetic"})
    answer, texts = _call("first", "rl_start_training", {})
    assert answer["code"] == "server_down"
    assert "lachesis serve" in answer["error"]
    assert texts == []
