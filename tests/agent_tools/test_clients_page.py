"""The examples of docs/how-to/agents.md work as they stand there."""

import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tomllib
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
import yaml

from lachesis.supervision.services.ports import reserve_free_ports
from tests.harness.command_line import parse_command
from tests.harness.http_answers import serve_answers
from tests.harness.waiting import wait_until

PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "agents.md").read_text()
SECTIONS = {
    part.partition("\n")[0]: re.findall(r"```(\w+)\n(.*?)```", part, re.DOTALL)
    for part in PAGE.split("\n## ")[1:]
}
COMMAND = "/path/to/lachesis/.venv/bin/lachesis"


def block(section, language, index=0):
    """Return an example; `section` is the beginning of its heading."""
    (blocks,) = [blocks for title, blocks in SECTIONS.items() if title.startswith(section)]
    return [text for kind, text in blocks if kind == language][index]


def parse_lachesis(command):
    """Return what our own parser makes of a command line of `lachesis`."""
    program, *words = shlex.split(command)
    assert Path(program).name == "lachesis"
    return parse_command(words)


def test_every_example_belongs_to_a_test():
    """A new example of the page needs one here."""
    kinds = {title: [kind for kind, _ in blocks] for title, blocks in SECTIONS.items() if blocks}
    assert kinds == {
        "Claude Code": ["console"],
        "Codex": ["toml"],
        "Cursor, Claude Desktop and others with an `mcpServers` file": ["json"],
        "MCP over HTTP": ["console", "console"],
        "Hermes Agent": ["console", "yaml"],
        "Plain function calling (OpenAI and compatible)": ["python"],
        "The HTTP service": ["console", "console"],
    }


def test_each_client_is_told_to_start_our_server():
    claude = block("Claude Code", "console").partition(" -- ")[2]
    codex = tomllib.loads(block("Codex", "toml"))["mcp_servers"]["lachesis"]
    cursor = json.loads(block("Cursor", "json"))["mcpServers"]["lachesis"]
    hermes = yaml.safe_load(block("Hermes", "yaml"))["mcp_servers"]["lachesis"]
    commands = [claude, *(shlex.join([c["command"], *c["args"]]) for c in (codex, cursor, hermes))]
    assert all(command.startswith(COMMAND) for command in commands)
    assert [parse_lachesis(command).session for command in commands[2:]] == ["cursor", "hermes"]
    http = parse_lachesis(block("MCP over HTTP", "console").removeprefix("$ "))
    assert (http.http, http.port) == (True, 8090)
    assert parse_lachesis(block("The HTTP service", "console").removeprefix("$ ")) is not None
    assert "lachesis" in {plugin.name for plugin in entry_points(group="hermes_agent.plugins")}


def is_listening(port):
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def answer_as_model(request):
    """Answer a chat first with a tool call and then with the tool's answer as text."""
    last = request.json()["messages"][-1]
    if last["role"] == "tool":
        message: dict[str, Any] = {"role": "assistant", "content": last["content"]}
    else:
        function = {"name": "rl_select_environment", "arguments": '{"name": "arithmetic"}'}
        call = {"id": "1", "type": "function", "function": function}
        message = {"role": "assistant", "content": None, "tool_calls": [call]}
    choice = {"index": 0, "finish_reason": "stop", "message": message}
    head = {"id": "a", "object": "chat.completion", "created": 0, "model": "m"}
    return {**head, "choices": [choice]}


def test_the_loop_of_plain_function_calling_runs(monkeypatch):
    """With the real client of OpenAI, at a server that speaks its protocol."""
    requests: list[Any] = []

    def answer(request):
        requests.append(request.json())
        return answer_as_model(request)

    names: dict[str, Any] = {}
    with serve_answers(answer) as url:
        monkeypatch.setenv("OPENAI_BASE_URL", f"{url}/v1")
        monkeypatch.setenv("OPENAI_API_KEY", "k")
        exec(compile(block("Plain", "python"), "docs/how-to/agents.md", "exec"), names)
    first, second = requests
    assert {tool["function"]["name"] for tool in first["tools"]} >= {"rl_start_training"}
    assert json.loads(second["messages"][-1]["content"])["environment"] == "arithmetic"
    names["client"].close()


@pytest.mark.skipif(not shutil.which("curl"), reason="curl is not installed")
def test_the_calls_of_the_http_service_are_answered(clean_environment):
    """No Prefect server is there, so the start is refused, with an error and a code."""
    port = reserve_free_ports(1)[0]
    env = {**os.environ, "LACHESIS_HOME": str(clean_environment)}
    command = [sys.executable, "-m", "lachesis.cli.main", "api", "--port", str(port)]
    with (clean_environment / "api.log").open("wb") as log:
        api = subprocess.Popen(command, env=env, stdout=log, stderr=log)
    lines = [line.removeprefix("$ ") for line in block("The HTTP", "console", 1).splitlines()]
    script = "\necho; ".join(lines).replace("localhost:8080", f"127.0.0.1:{port}")
    try:
        wait_until(lambda: is_listening(port), 30, log=clean_environment / "api.log")
        done = subprocess.run(
            ["bash", "-c", script], env=env, capture_output=True, text=True, timeout=60, check=True
        )
    finally:
        api.terminate()
        api.wait(20)
    selected, edited, started, listed = map(json.loads, filter(None, done.stdout.splitlines()))
    assert selected["environment"] == "arithmetic"
    assert edited["value"] == 40
    assert started["code"] == "server_down"
    assert listed["runs"] == []
