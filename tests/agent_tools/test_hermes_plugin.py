"""The plugin in a loader that follows what Hermes documents: entry point, module with `register`,
schemas that are checked, handlers called with keywords of which a plugin knows nothing.
"""

import json
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType

import pytest

from lachesis.agent_tools.tools import TOOLS
from lachesis.base.json_text import Json


class Loader:
    """Loads the entry point and keeps a registry, as Hermes does."""

    def __init__(self):
        self.registry: dict[str, Json] = {}
        self.skills: dict[str, Path] = {}
        (found,) = entry_points(group="hermes_agent.plugins", name="lachesis")
        module = found.load()
        assert isinstance(module, ModuleType), "Hermes looks for `register` in a module"
        module.register(self)

    def register_tool(
        self,
        name,
        toolset,
        schema,
        handler,
        check_fn=None,
        requires_env=None,
        is_async=False,
        description="",
        emoji="",
        override=False,
    ):
        if not isinstance(schema, dict) or not isinstance(schema.get("parameters"), dict):
            raise ValueError("schema")
        self.registry[name] = {
            "toolset": toolset,
            "schema": schema,
            "handler": handler,
            "check": check_fn,
            "env": requires_env,
        }

    def register_skill(self, name, path, description=""):
        if not path.exists():
            raise FileNotFoundError(path)
        self.skills[name] = path

    def offered(self):
        return [name for name, one in self.registry.items() if one["check"]()]

    def dispatch(self, name, arguments, **context):
        text = self.registry[name]["handler"](
            arguments, **{"task_id": "t", "user_task": None, **context}
        )
        assert isinstance(text, str)
        answer: Json = json.loads(text)
        return answer


def test_the_tools_stand_in_the_toolset_under_their_old_names(home):
    loader = Loader()
    assert list(loader.registry) == list(TOOLS)
    assert {value["toolset"] for value in loader.registry.values()} == {"rl"}
    for name, one in loader.registry.items():
        assert one["schema"]["name"] == name
        assert one["schema"]["parameters"]["type"] == "object"
        assert "type" not in one["schema"]["parameters"].get("properties", {}).get("value", {}), (
            "a value is not coerced"
        )
    assert loader.skills["rl-training"].name == "SKILL.md"


def test_the_keyless_profile_is_offered_and_a_paid_one_only_with_its_key(home, monkeypatch):
    loader = Loader()
    assert loader.offered() == list(TOOLS)
    assert loader.registry["rl_start_training"]["env"] == []
    monkeypatch.setenv("LACHESIS_PROFILE", "tinker")
    assert loader.offered() == []
    assert Loader().registry["rl_start_training"]["env"] == ["TINKER_API_KEY"]
    monkeypatch.setenv("TINKER_API_KEY", "tml-x")
    assert loader.offered() == list(TOOLS)


def test_two_sessions_of_hermes_have_two_drafts(home):
    loader = Loader()
    loader.dispatch("rl_select_environment", {"name": "arithmetic"}, session_id="20261121_abc")
    assert (
        loader.dispatch("rl_get_current_config", {}, session_id="20261121_abc")["environment"]
        == "arithmetic"
    )
    assert loader.dispatch("rl_get_current_config", {}, session_id="../../x")["code"] == "run_state"
    assert loader.dispatch("rl_get_current_config", {}, session_id=None)["code"] == "run_state"


@pytest.mark.parametrize("arguments", [None, {}, [], "x", 7, {"surplus": 1}, {"run_id": None}])
def test_a_handler_never_raises(home, arguments):
    loader = Loader()
    for name in TOOLS:
        answer = loader.dispatch(name, arguments, session_id="s", parent_agent=object())
        assert len(str(answer.get("error", ""))) <= 2048
        assert "a fault of" not in str(answer.get("error", ""))
