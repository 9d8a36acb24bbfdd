"""Environments written for `verifiers`, with the real library in the place where `lachesis env
install` puts it.
"""

import json
import os
import subprocess
from pathlib import Path

import pytest

from lachesis.base.errors import RequirementsError
from lachesis.environment_catalog import requirements

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "environments" / "verifiers_environment.py"


@pytest.fixture(scope="module")
def python():
    """The one that has `verifiers`; where nobody has installed it, its tests are left out, as it is
    a large library.
    """
    before, os.environ["LACHESIS_HOME"] = (
        os.environ.get("LACHESIS_HOME"),
        os.environ.get("LACHESIS_TEST_HOME", str(ROOT / ".home")),
    )
    try:
        return requirements.find_interpreter(FILE)
    except RequirementsError:
        pytest.skip(
            "`verifiers` is not installed: LACHESIS_HOME=$PWD/.home lachesis env install "
            "verifiers_environment"
        )
    finally:
        if before is None:
            del os.environ["LACHESIS_HOME"]
        else:
            os.environ["LACHESIS_HOME"] = before


@pytest.fixture
def play(python, random_model):
    def run(kind, *answers):
        script = str(Path(__file__).with_name("verifiers_rollouts.py"))
        command = [python, script, kind, json.dumps(answers), random_model]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout.splitlines()[-1])

    return run


def test_single_answers_are_scored_by_the_rubric(play):
    found = play("single", "21", "wrong answer", "3", "bug", "!", "21…")
    assert found["sizes"] == [35, 5], (
        "what is held out is not trained on, though it stands in both data sets"
    )
    rollouts = found["rollouts"]
    assert [rollout["reward"] for rollout in rollouts] == [1.25, 0.0, 0.25, None, None, 1.25]
    assert rollouts[3]["reason"].startswith("right raised KeyError at verifiers_words.py:")
    assert rollouts[3]["reason"].endswith(": 'a fault of the function'")
    assert "OSError" in rollouts[4]["reason"]
    assert all(rollout["whole"] for rollout in rollouts)
    assert rollouts[0]["text"].endswith("reverse 12<|end|><|assistant|>21<|end|>")
    assert rollouts[0]["trained"] == "21<|end|>"
    assert [rollout["truncated"] for rollout in rollouts] == [False] * 5 + [True]


def test_turns_are_one_conversation_of_sampled_tokens(play):
    (one,) = play("turns", "12", "21")["rollouts"]
    assert one["text"].endswith(
        "reverse 12<|end|><|assistant|>12<|end|><|user|>sure?<|end|><|assistant|>21<|end|>"
    )
    assert one["trained"] == "12<|end|>21<|end|>"
    assert (one["reward"], one["answer"]) == (1.0, "21")


def test_tools_are_described_called_and_answered(play):
    call = '<tool_call>{"name": "backwards", "arguments": {"word": "12"}}</tool_call>'
    found = play("tools", call, "21")
    assert '"name": "backwards"' in found["asked"][0]
    (one,) = found["rollouts"]
    assert one["trained"] == f"{call}<|end|>21<|end|>"
    assert one["reward"] == 1.0


def test_a_group_is_scored_together(play):
    assert [rollout["reward"] for rollout in play("group", "1", "12", "123")["rollouts"]] == [
        0.0,
        0.0,
        1.0,
    ]


def test_a_python_without_it_says_what_to_do(clean_environment):
    if requirements.list_missing_requirements(requirements.read_requirements(FILE)) == []:
        pytest.skip("`verifiers` is installed beside this project")
    with pytest.raises(RequirementsError, match="lachesis env install"):
        requirements.find_interpreter(FILE)
