"""`lachesis env new` and `lachesis env check`, as their user has them: children, an engine, no
Prefect server.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lachesis.base.errors import ConfigError, StorageError
from lachesis.environment_catalog import new_environment
from lachesis.environment_check import token_checks
from lachesis.environment_process.model_free_check import STAGE_NAMES
from tests.harness.process_variables import make_nosy, read_variables
from tests.harness.served_home import processes_under

pytestmark = pytest.mark.timeout(400)
ALL = [*STAGE_NAMES, "rollout", "tokens", "round trip", "stop tokens", "truncation"]


def lachesis(*words, home, cwd):
    """Exit code, what was said in JSON, and what was said to a person."""
    env = {**os.environ, "LACHESIS_HOME": str(home)}
    command = [sys.executable, "-P", "-m", "lachesis.cli.main", *words, "--json"]
    done = subprocess.run(command, env=env, cwd=cwd, capture_output=True, text=True, check=False)
    return done.returncode, json.loads(done.stdout) if done.stdout else None, done.stderr


@pytest.mark.long  # in `make test` an agent has one checked as a whole
def test_a_new_environment_passes_every_check(
    tmp_path: Path, new_home: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its processes have none of the user's keys, and do not log to W&B: with a key and no way to
    its server, that would end in a time-out.
    """
    home = new_home()
    code, made, _ = lachesis("env", "new", "loud_words", home=home, cwd=tmp_path)
    assert (code, made["file"]) == (0, "loud_words.py")
    file = tmp_path / "loud_words.py"
    make_nosy(file, monkeypatch)
    code, found, said = lachesis("env", "check", "loud_words.py", home=home, cwd=tmp_path)
    assert code == 0, (found, said)
    assert [line["name"] for line in found["checks"]] == ALL
    assert {line["status"] for line in found["checks"]} == {"passed"}
    assert (found["environment"], found["logs"]) == ("loud_words", None)
    assert processes_under(tmp_path) == {}
    variables = read_variables(file)
    assert {process["WANDB_MODE"] for process in variables} == {"disabled"}
    assert len(variables) == 3, (
        "one that describes it, one for its data and verifier, one for its rollouts"
    )
    assert not list(tmp_path.rglob("wandb"))
    assert not list(home.rglob("wandb"))
    code, _, said = lachesis("env", "new", "loud_words", home=home, cwd=tmp_path)
    assert code == 1


FAULTS = {  # what is replaced, with what, and what is said then
    "import": ("import random\n", "import random\nimport no_such_module\n", "no_such_module"),
    "dataset": ("for word in sorted(words)]", "for word in []]", "has 0 different items"),
    "rollout": (
        "        # Named parts;",
        "        assert answer.isupper(), 'bug'\n        #",
        "AssertionError at faulty.py:",
    ),
    "model-free check": (
        'return {"letters": 0.5 * letters, "exact": 0.5 * (said == right)}',
        "return 1.0",
        "the answer of corrupt() must score less",
    ),
}


@pytest.mark.parametrize(
    "stage",
    [
        "import",
        "dataset",
        "model-free check",
        pytest.param("rollout", marks=pytest.mark.long),  # it starts an engine
    ],
)
def test_the_check_that_fails_is_named_and_is_the_last(tmp_path, new_home, stage):
    file = new_environment.write_scaffold("faulty", tmp_path)
    old, new, said = FAULTS[stage]
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new, 1))
    code, found, err = lachesis("env", "check", str(file), home=new_home(), cwd=tmp_path)
    if stage == "import":  # told before anything is started
        assert (code, said in json.dumps(found)) == (1, True), (found, err)
        return
    assert code == 1, found
    assert (found["checks"][-1]["name"], found["checks"][-1]["status"]) == (stage, "failed")
    assert said in found["checks"][-1]["message"]


def group(**changes):
    one = {
        "tokens": [[1, 2, 3, 9]],
        "masks": [[-100, -100, 3, 9]],
        "inference_logprobs": [[1.0, 1.0, -0.5, -0.1]],
    }
    return {**one, "scores": [1.0], **changes}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"masks": [[-100, 3, 9]]}, "4 tokens, 3 masks and 4 logprobs"),
        ({"masks": [[-100, -100, 1, 1]]}, "a mask 1 at token 3; allowed: -100 and the token"),
        ({"inference_logprobs": [[1.0, 1.0, 0.5, 0.5]]}, "a log-probability of 0.5"),
        ({"inference_logprobs": [[1.0, 1.0, float("nan"), 0.0]]}, "a log-probability of nan"),
        ({"masks": [[-100] * 4]}, "nothing would be trained on"),
    ],
)
def test_what_could_not_be_trained_on_is_told(changes, said):
    line = token_checks.check_tokens(group(**changes))
    assert line.status == "failed"
    assert said in line.message


def test_a_first_token_that_is_trained_on_needs_no_log_probability():
    """Nothing comes before it, so its place holds a sentinel; the trainer leaves it out."""
    line = token_checks.check_tokens(
        group(masks=[[1, 2, 3, 9]], inference_logprobs=[[1.0, -0.2, -0.5, -0.1]])
    )
    assert line.status == "passed"


def test_a_group_without_log_probabilities_is_warned_of():
    line = token_checks.check_tokens(group(inference_logprobs=None))
    assert line.status == "warned"
    assert line.message.startswith(
        "2 of 4 would be trained on: those that the model has generated; the group has no "
        "inference_logprobs"
    )


def test_turns_that_end_twice_or_never_are_warned_of():
    assert token_checks.check_stop_tokens(group(), eos_id=9).status == "passed"
    assert token_checks.check_stop_tokens(group(), eos_id=7).message.startswith(
        "0 of 1 answers end"
    )
    twice = group(tokens=[[1, 9, 9, 5, 9]], masks=[[-100, 9, -100, 5, 9]])
    assert "1 turns end twice" in token_checks.check_stop_tokens(twice, eos_id=9).message
    assert token_checks.check_truncation({"truncated": 5, "completions": 8}).status == "warned"


@pytest.mark.parametrize(
    "name", ["../evil", "Evil", "class", "1st", "", "a" * 65, "a.b", "a/b", "ä"]
)
def test_a_name_that_is_none_is_refused(tmp_path, name):
    with pytest.raises(ConfigError, match="cannot be an environment's name"):
        new_environment.write_scaffold(name, tmp_path)
    assert not list(tmp_path.iterdir())


def test_nothing_is_written_over(tmp_path):
    new_environment.write_scaffold("mine", tmp_path).write_text("work of hours")
    with pytest.raises(StorageError, match="already exists"):
        new_environment.write_scaffold("mine", tmp_path)
    assert (tmp_path / "mine.py").read_text() == "work of hours"
    with pytest.raises(StorageError):
        new_environment.write_scaffold("mine", tmp_path / "mine.py" / "folder")
