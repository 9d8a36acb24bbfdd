"""Questions to a model that cannot be asked are refused before anything is loaded."""

import json

import pytest

from lachesis.cli.main import main
from lachesis.runs.store import RunStore
from tests.harness.home import make_record

RUN = "0123abcd"


@pytest.fixture(autouse=True)
def run(clean_environment):
    RunStore(clean_environment).create(make_record())


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["ask", RUN, "3+4="], "run_state", "there is no checkpoint yet"),
        (["ask", RUN, "3+4=", "--checkpoint", "7"], "run_state", "7"),
        (["ask", RUN, ""], "arguments", "the question is empty"),
        (["chat", RUN], "arguments", "`lachesis ask RUN TEXT --json` is for programs"),
        (["serve-model", RUN], "run_state", "there is no checkpoint yet"),
        (["ask", "ffff0000", "3+4="], "unknown_run", "there is no run 'ffff0000'"),
    ],
)
def test_what_cannot_be_asked_is_refused(words, code, message, capsys):
    assert main([*words, "--json"]) == 1
    answer = json.loads(capsys.readouterr().out)
    assert answer["code"] == code
    assert message in answer["error"]


def test_a_temperature_that_is_not_one_is_refused(capsys):
    for text in ("hot", "-1", "11", "nan"):
        with pytest.raises(SystemExit):
            main(["ask", RUN, "3+4=", f"--temperature={text}"])
        assert "allowed: a number from 0 to 10" in capsys.readouterr().err
