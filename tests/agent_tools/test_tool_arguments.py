"""Every tool is an async function that returns JSON text and refuses bad arguments."""

import inspect
import json
from typing import Any

import pytest

from lachesis.agent_tools import tools
from lachesis.agent_tools.draft import select_environment
from lachesis.agent_tools.tools import TOOLS, CallContext
from lachesis.base.json_text import Json


def test_the_helpers_name_what_is_missing(monkeypatch):
    assert tools.check_rl_python_version()
    assert tools.check_rl_api_keys()
    assert tools.get_missing_keys() == []
    monkeypatch.setenv("LACHESIS_PROFILE", "tinker")
    assert not tools.check_rl_api_keys()
    assert tools.get_missing_keys() == ["TINKER_API_KEY"]
    monkeypatch.setenv("TINKER_API_KEY", "tml-x")
    assert tools.check_rl_api_keys()


async def test_a_tool_is_an_async_function_that_gives_json_text(home, monkeypatch):
    """As an agent's own loop calls it."""
    assert inspect.iscoroutinefunction(tools.rl_edit_config)
    assert list(inspect.signature(tools.rl_edit_config).parameters) == ["field", "value"]
    monkeypatch.setenv("LACHESIS_SESSION", "old-agent")
    assert (
        json.loads(await tools.rl_select_environment("arithmetic"))["environment"] == "arithmetic"
    )
    text = await tools.rl_edit_config("group_size", 8)
    assert text.startswith('{"message":')
    assert json.loads(await tools.rl_edit_config(field="group_size", value=8))["value"] == 8
    assert json.loads(await tools.rl_list_runs(1, 2, 3))["code"] == "arguments"
    monkeypatch.setenv("LACHESIS_SESSION", "../x")
    assert json.loads(await tools.rl_list_runs())["code"] == "config"


BAD: list[Any] = [
    None,
    7,
    -1,
    1.5,
    True,
    [],
    {},
    "x" * 200_000,
    "../../x",
    "a\x00\x1b[31m",
    "\ud800",
    [[[]]],
    {"a": None},
]


@pytest.mark.parametrize("name", TOOLS)
def test_bad_arguments_are_errors_and_never_faults(name, desk):
    """Each argument missing, null, of a wrong type, absurdly long, like a path, with control
    characters.
    """
    select_environment(desk, "arithmetic")
    tool = TOOLS[name]
    good: Json = {
        "name": "arithmetic",
        "field": "group_size",
        "value": 8,
        "run_id": "ffffffff",
        "dry_run": True,
        "test_id": "ffffffff",
    }
    known = {key: value for key, value in good.items() if key in tool.arguments.model_fields}
    for argument in [*tool.arguments.model_fields, "surplus"]:
        cases = [{**known, argument: value} for value in BAD] + [
            {key: one for key, one in known.items() if key != argument}
        ]
        for arguments in cases:
            if name == "rl_test_inference" and "test_id" not in arguments:
                continue  # it would be a test of its own
            answer, _ = tool.run_safely(CallContext(desk), arguments)
            text = tools.to_compact_json(answer)
            text.encode()
            assert len(text) < 60_000
            assert "a fault of" not in text, (arguments, text)
            if "error" in answer and "status" not in answer:
                assert answer["code"]
    for arguments in (None, "text", [1]):
        assert "a fault of" not in tools.to_compact_json(
            tool.run_safely(CallContext(desk), arguments)[0]
        )  # type: ignore[arg-type]
