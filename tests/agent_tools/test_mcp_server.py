"""The MCP server, by the SDK's own client in the same process; real processes are in tests/e2e."""

import contextlib
import json

import jsonschema
import pytest
from mcp import Client, MCPError

from lachesis.agent_tools.mcp_server import create_server
from lachesis.agent_tools.tools import TOOLS
from lachesis.runs.metrics import KEY_METRICS, MetricsFile
from lachesis.runs.store import RunStore


@contextlib.asynccontextmanager
async def connected(session="test"):
    async with Client(create_server(session)) as client:
        yield client


async def ask(client, tool, **arguments):
    answer = await client.call_tool(tool, arguments)
    return json.loads(answer.content[0].text), bool(answer.is_error)  # type: ignore[union-attr]


async def test_every_tool_is_listed_with_schemas_and_all_hints(home):
    async with connected() as client:
        listed = (await client.list_tools()).tools
    assert [tool.name for tool in listed] == list(TOOLS)
    for tool in listed:
        assert tool.title
        assert len(tool.description or "") > 40
        assert tool.input_schema["additionalProperties"] is False
        jsonschema.Draft202012Validator.check_schema(tool.input_schema)
        hints = tool.annotations
        assert hints is not None
        assert None not in (
            hints.read_only_hint,
            hints.destructive_hint,
            hints.idempotent_hint,
            hints.open_world_hint,
        )
    by_name = {tool.name: tool for tool in listed}
    assert by_name["rl_stop_training"].annotations.destructive_hint  # type: ignore[union-attr]
    assert by_name["rl_check_status"].annotations.read_only_hint  # type: ignore[union-attr]
    confirmed = {
        name
        for name, tool in by_name.items()
        if "confirm" in tool.input_schema.get("properties", {})
    }
    assert confirmed == {"rl_start_training", "rl_stop_training"}


async def test_what_an_agent_must_read_is_short(home, make_run):
    run = make_run(status="completed")
    metrics = MetricsFile(RunStore(home).dir(run.run_id).metrics)
    for step in range(1, 101):
        metrics.append(
            step,
            {
                name: 0.123456
                for name in (*KEY_METRICS, *(f"other/{number}" for number in range(45)))
            },
        )
    async with connected() as client:
        listed = await client.list_tools()
        await ask(client, "rl_select_environment", name="arithmetic")
        config = await client.call_tool("rl_get_current_config", {})
        results = await client.call_tool("rl_get_results", {"run_id": run.run_id})
    assert len(listed.model_dump_json(by_alias=True, exclude_none=True)) < 34_000
    told_config = config.content[0].text.replace(str(home), "HOME")  # type: ignore[union-attr]
    assert len(told_config) < 20_000
    assert "one of" not in told_config, "choices are in `type` already"
    assert len(results.content[0].text) < 9_000  # type: ignore[union-attr]
    told = json.loads(results.content[0].text)  # type: ignore[union-attr]
    assert len(told["history"]) == 10
    assert set(told["history"][0]) == {"step", "time", *KEY_METRICS}
    assert "other/44" in told["final_metrics"]


async def test_a_client_of_the_older_protocol_is_served_too(home):
    async with Client(create_server("test"), mode="legacy") as client:
        assert client.protocol_version < "2026"
        assert len((await client.list_tools()).tools) == len(TOOLS)
        assert (await ask(client, "rl_list_environments"))[0]["count"] >= 1


async def test_answers_are_structured_and_errors_can_be_mended(home, make_run):
    """The client checks each answer against its schema."""
    run_id = make_run().run_id
    async with connected() as client:
        for name, arguments in (
            ("rl_list_environments", {}),
            ("rl_select_environment", {"name": "arithmetic"}),
            ("rl_get_current_config", {}),
            ("rl_edit_config", {"field": "seed", "value": 1}),
            ("rl_start_training", {"dry_run": True}),
            ("rl_check_status", {"run_id": run_id}),
            ("rl_check_status", {"run_id": run_id}),
            ("rl_get_results", {"run_id": run_id}),
            ("rl_list_runs", {}),
            ("rl_health_check", {}),
        ):
            answer = await client.call_tool(name, arguments)
            assert not answer.is_error, (name, answer)
            assert answer.structured_content == json.loads(answer.content[0].text)  # type: ignore[union-attr]
        wrong, failed = await ask(client, "rl_edit_config", field="seed", value="x")
        assert failed
        assert wrong["code"] == "field_value"
        missing, failed = await ask(client, "rl_edit_config", field="seed")
        assert failed
        assert "value is missing" in missing["error"]
        with pytest.raises(MCPError, match="rl_list_environments"):
            await client.call_tool("rl_nothing", {})


async def test_a_start_that_may_cost_money_is_a_preview_until_it_is_confirmed(
    home, random_model, monkeypatch
):
    monkeypatch.setenv("TINKER_API_KEY", "tml-secret-1")
    async with connected() as client:
        await ask(
            client, "rl_select_environment", name="arithmetic", profile="tinker", model=random_model
        )
        preview, failed = await ask(client, "rl_start_training")
        assert not failed
        assert preview["confirmation_required"] is True
        assert "run_id" not in preview
        assert "tml-secret-1" not in json.dumps(preview)
        assert (await ask(client, "rl_list_runs"))[0]["count"] == 0
        confirmed, failed = await ask(client, "rl_start_training", confirm=preview["preview"])
        assert (confirmed["code"], failed) == ("validation_missing", True), "it went on to the gate"
        for no_yes in ("yes", "0123456789ab"):
            again, failed = await ask(client, "rl_start_training", confirm=no_yes)
            assert again["confirmation_required"] is True
        wrong, failed = await ask(client, "rl_start_training", confirm=1)
        assert (wrong["code"], failed) == ("arguments", True)
        await ask(client, "rl_select_environment", name="arithmetic")
        assert (await ask(client, "rl_start_training"))[0]["code"] == "server_down", (
            "nothing to confirm without cost"
        )


async def test_a_stop_is_asked_for_only_where_the_owner_says_so(home, make_run):
    first, second = (make_run(profile="tinker", status="pending").run_id for _ in range(2))
    async with connected() as client:
        stopped, _ = await ask(client, "rl_stop_training", run_id=first)
        assert stopped["status"] == "stopped"
        (home / "policy.yaml").write_text("agents: {confirm_stop: true}")
        preview, _ = await ask(client, "rl_stop_training", run_id=second)
        assert (preview["confirmation_required"], preview["status"]) == (True, "pending")
        resumed, _ = await ask(client, "rl_start_training", resume=second)
        assert resumed["confirmation_required"] is True
        other, _ = await ask(client, "rl_stop_training", run_id=second, confirm=True)
        assert other["confirmation_required"] is True, "true agrees to what was shown last"
        stopped, _ = await ask(
            client, "rl_stop_training", run_id=second, confirm=preview["preview"]
        )
        assert stopped["status"] == "stopped"
        again, _ = await ask(client, "rl_stop_training", run_id=second)
        assert "is not running" in again["message"]
        assert (await ask(client, "rl_stop_training", run_id="ffffffff"))[0][
            "code"
        ] == "unknown_run"


async def test_the_skill_is_the_one_resource(home):
    async with connected() as client:
        (skill,) = (await client.list_resources()).resources
        (content,) = (await client.read_resource(skill.uri)).contents
        assert content.text.startswith("---\nname: rl-training")  # type: ignore[union-attr]
        for uri in ("file:///etc/passwd", "lachesis://x", "lachesis://skill/../README.md"):
            with pytest.raises(MCPError, match="allowed: lachesis://skill"):
                await client.read_resource(uri)
