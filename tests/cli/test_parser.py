"""The command line answers mistakes with the nearest right word, and its help is there at once."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from lachesis.cli.commands import HANDLERS
from lachesis.cli.main import GROUPS, build_parser, main


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["trian"], "'trian' is not known; did you mean train;"),
        (["train", "sums", "--step-s", "3"], "did you mean --steps"),
        (["runs", "--sort", "rewards"], "did you mean reward; allowed: created, reward"),
        (["status"], "the following arguments are required: run"),
        (["runs", "--limit", "0"], "'0'; allowed: a whole number from 1"),
        ([], "the following arguments are required: COMMAND"),
    ],
)
def test_a_mistake_names_what_is_allowed(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(words)
    shown = capsys.readouterr()
    assert end.value.code == 2
    assert message in shown.err
    assert not shown.out


def test_a_mistake_is_json_for_a_program(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["status", "--json"])
    answer = json.loads(capsys.readouterr().out)
    assert end.value.code == 2
    assert answer["code"] == "arguments"
    assert "required: run" in answer["error"]


def test_every_command_is_in_the_help_and_has_a_function(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    parser = build_parser()
    lines = parser.format_help().splitlines()
    assert max(map(len, lines)) <= 80
    for title in GROUPS:
        assert f"{title}:" in lines
    assert set(parser.commands) == set(HANDLERS)
    for name, command in parser.commands.items():
        assert any(line.startswith(f"  {name} ") for line in lines), name
        assert max(map(len, command.format_help().splitlines())) <= 80, name
        assert f"example: {command.epilog}".count("lachesis"), "each has an example"


@pytest.mark.parametrize("words", [["--help"], ["train", "--help"], ["--version"]])
def test_the_help_loads_nothing_that_takes_long(words: list[str]) -> None:
    script = (
        "import runpy, sys\n"
        f"sys.argv = ['lachesis', *{words!r}]\n"
        "try:\n    runpy.run_module('lachesis.cli.main', run_name='__main__')\n"
        "except SystemExit: pass\n"
        "heavy = {'pydantic', 'rich', 'httpx', 'yaml', 'polars', 'lachesis.operations.service'}\n"
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr.strip() == "[]"
