"""One call of an agent, in a process of its own that kills itself afterwards: nothing can be
remembered but what is on disk.

python agent.py TRANSPORT TOOL ARGUMENTS        TRANSPORT: stdio, mcp-http, hermes or http prints
the answer as JSON. URL and TOKEN of the HTTP transports are in the environment.
"""

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any

from lachesis.base.json_text import Json

SESSION = os.environ.get("LACHESIS_SESSION", "")


def main() -> None:
    transport, tool, arguments = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    calls: dict[str, Callable[[str, Json], Any]] = {
        "stdio": stdio,
        "mcp-http": mcp_http,
        "hermes": hermes,
        "http": http,
    }
    print(json.dumps(calls[transport](tool, arguments)), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def stdio(tool: str, arguments: Json) -> Json:
    from mcp import Client, StdioServerParameters

    command = StdioServerParameters(
        command=sys.executable, args=["-m", "lachesis.cli.main", "mcp"], env=dict(os.environ)
    )
    return asyncio.run(_mcp(Client(command), tool, arguments))


def mcp_http(tool: str, arguments: Json) -> Json:
    async def run() -> Json:
        import httpx2
        from mcp import Client
        from mcp.client.streamable_http import streamable_http_client

        headers = {"Authorization": f"Bearer {os.environ['TOKEN']}", "X-Lachesis-Session": SESSION}
        async with httpx2.AsyncClient(
            headers=headers, timeout=httpx2.Timeout(30, read=60), trust_env=False
        ) as client:
            return await _mcp(
                Client(streamable_http_client(f"{os.environ['URL']}/mcp", http_client=client)),
                tool,
                arguments,
            )

    return asyncio.run(run())


async def _mcp(client: Any, tool: str, arguments: Json) -> Json:
    reported: list[float] = []

    async def progress(done: float, total: float | None, text: str | None) -> None:
        reported.append(done)

    async with client:
        answer = await client.call_tool(tool, arguments, progress_callback=progress)
    content: Json = json.loads(answer.content[0].text)
    if not answer.is_error:
        assert answer.structured_content == content
    return (
        {**content, "progress_notifications": reported} if tool == "rl_test_inference" else content
    )


class HermesContext:
    """What Hermes gives to a plugin, as far as a plugin of tools sees it."""

    def __init__(self) -> None:
        self.tools: dict[str, Callable[..., str]] = {}

    def register_tool(
        self, name: str, toolset: str, schema: Json, handler: Callable[..., str], **_: Any
    ) -> None:
        assert isinstance(schema["parameters"], dict)
        self.tools[name] = handler


def hermes(tool: str, arguments: Json) -> Json:
    (plugin,) = entry_points(group="hermes_agent.plugins", name="lachesis")
    context = HermesContext()
    plugin.load().register(context)
    text = context.tools[tool](arguments, task_id="t", session_id="s", user_task=None)
    answer: Json = json.loads(text)
    return answer


ROUTES = {
    "rl_list_environments": ("GET", "/environments"),
    "rl_select_environment": ("POST", "/environments/{name}/select"),
    "rl_get_current_config": ("GET", "/config"),
    "rl_edit_config": ("POST", "/config"),
    "rl_list_runs": ("GET", "/runs"),
    "rl_start_training": ("POST", "/runs"),
    "rl_check_status": ("GET", "/runs/{run_id}"),
    "rl_stop_training": ("POST", "/runs/{run_id}/stop"),
    "rl_get_results": ("GET", "/runs/{run_id}/metrics"),
    "rl_test_inference": ("POST", "/test/inference"),
    "rl_health_check": ("GET", "/health"),
}


def http(tool: str, arguments: Json) -> Any:
    """As its clients do: 30 s a call, only 200 is success."""
    import httpx

    method, path = ROUTES[tool]
    rest = {name: value for name, value in arguments.items() if f"{{{name}}}" not in path}
    body = rest if method == "POST" and (rest or "{" not in path) else None
    headers = {"X-Lachesis-Session": SESSION, "Authorization": f"Bearer {os.environ['TOKEN']}"}
    url = os.environ["URL"] + path.format(**arguments)
    answer = httpx.request(method, url, json=body, headers=headers, timeout=30, trust_env=False)
    content = answer.json()
    assert (answer.status_code == 200) == ("code" not in content), answer.text
    return (
        {"environments": content}
        if tool == "rl_list_environments" and isinstance(content, list)
        else content
    )


if __name__ == "__main__":
    main()
