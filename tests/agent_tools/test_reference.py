"""What is written about the tools is true."""

import re
from pathlib import Path

import yaml

from lachesis.agent_tools.answers import ANSWER_KEYS
from lachesis.agent_tools.tools import TOOLS
from lachesis.base.errors import LachesisError

ROOT = Path(__file__).resolve().parents[2]
SKILL = ROOT / "skills" / "rl-training" / "SKILL.md"


def test_every_tool_has_its_keys_and_stands_in_the_skill_or_the_guide():
    assert set(ANSWER_KEYS) == set(TOOLS)
    text = SKILL.read_text() + (ROOT / "docs" / "how-to" / "agents.md").read_text()
    assert [name for name in TOOLS if name not in text] == []


def test_the_skill_follows_the_specification():
    _, head, body = SKILL.read_text().split("---\n", 2)
    front = yaml.safe_load(head)
    assert front["name"] == SKILL.parent.name
    assert len(front["description"]) <= 1024
    assert len(front["compatibility"]) <= 500
    assert set(front) <= {
        "name",
        "description",
        "license",
        "compatibility",
        "metadata",
        "allowed-tools",
    }
    assert len(body.splitlines()) < 500


def test_the_skill_calls_only_what_there_is():
    """Tools, their arguments and error codes."""
    text = SKILL.read_text()
    for tool, arguments in re.findall(r"(rl_\w+)\(([^)]*)\)", text):
        for argument in re.findall(r"(?:^|, )(\w+)=", arguments):
            assert argument in TOOLS[tool].arguments.model_fields
    codes = {kind.code for kind in _all(LachesisError)}
    errors = text.split("## Errors")[1].split("Calling again")[0]
    assert (
        set(re.findall(r"`([a-z]+_[a-z]+|arguments|storage)`", errors))
        - {"available_fields", "active_runs"}
        <= codes
    )


def _all(kind):
    return [kind, *(one for child in kind.__subclasses__() for one in _all(child))]
