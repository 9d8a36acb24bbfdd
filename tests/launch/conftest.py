"""A home without models, an environment of our own, and commands that are refused."""

import json

import pytest

from lachesis.cli.main import main
from lachesis.config import run_config as run_config

OWN = '''"""Sums by another name."""

from lachesis.environment import TaskEnv


class Own(TaskEnv):
    """Say the word again."""

    name = "own"

    def load_dataset(self):
        return [{"question": word} for word in ("stressed", "drawer", "live", "parts", "loop")]

    def score_answer(self, item, answer):
        return float(answer.strip() == item["question"])

    def gold(self, item):
        return item["question"]

    def corrupt(self, item):
        return item["question"] + "!"
'''


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """A folder with the environment `own`."""
    folder = tmp_path_factory.mktemp("shared")
    (folder / "mine").mkdir()
    (folder / "mine" / "own.py").write_text(OWN)
    return folder


@pytest.fixture(autouse=True)
def home(clean_environment):
    return clean_environment


@pytest.fixture
def own(shared, monkeypatch):
    """A file with an environment that no model of this home knows."""
    monkeypatch.setenv("LACHESIS_ENVIRONMENTS", "")  # a command that is given the file adds it
    monkeypatch.chdir(shared / "mine")
    return shared / "mine" / "own.py"


@pytest.fixture
def refused(capsys):
    """Run a command that must fail; its error."""

    def run(*words):
        assert main([*words, "--json"]) == 1
        answer = json.loads(capsys.readouterr().out)
        assert "\n" not in answer["error"]
        return answer

    return run
