"""The command line answers mistakes with the nearest right word, and its help is there at once."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from lachesis.cli.main import GROUPS, NOUNS, main


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["trian"], "'trian' is not known; did you mean train;"),
        (["train", "sums", "--step-s", "3"], "Did you mean --steps"),
        (["runs", "--sort", "rewards"], 'Choose from: "created", "reward"'),
        (["status"], "RUN is missing; `lachesis status --help` describes the command"),
        (["logs", "a", "b", "c"], "nothing is meant by c"),
        (["env", "shwo"], "`env shwo` is not known; did you mean show; allowed: list, show, new"),
        (["envs"], "'envs' is not known; use `lachesis env list`"),
        (["weights", "@last"], "'weights' is not known; use `lachesis export`"),
        (["train", "sums", "--steps"], "--steps"),
        (["compare", "a", "b", "--html", "f"], "--html"),
        (["runs", "--limit", "0"], "'0'; allowed: a whole number from 1"),
    ],
)
def test_a_mistake_names_what_is_allowed(words, message, capsys):
    with pytest.raises(SystemExit) as end:
        main(words)
    shown = capsys.readouterr()
    assert end.value.code == 2
    assert message in shown.err
    assert not shown.out


def test_a_mistake_is_json_for_a_program(capsys):
    with pytest.raises(SystemExit) as end:
        main(["status", "--json"])
    answer = json.loads(capsys.readouterr().out)
    assert end.value.code == 2
    assert answer["code"] == "arguments"
    assert "RUN" in answer["error"]


def test_every_command_is_in_the_help_and_has_a_function(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    for title, commands in GROUPS.items():
        assert any(title in line for line in lines)
        for words, *_, example in commands:
            assert example.startswith(("lachesis ", "eval ")), "each has an example"
            assert any(f" {words.split()[0]} " in line for line in lines), words
            assert main([*words.split(), "--help"]) == 0
            shown = capsys.readouterr().out
            assert max(map(len, shown.splitlines())) <= 80, words
            assert f"example: {example}" in shown


@pytest.mark.parametrize("noun", NOUNS)
def test_a_noun_alone_lists_its_verbs(noun, capsys):
    assert main([noun]) == 0
    message = capsys.readouterr().out
    for commands in GROUPS.values():
        for words, *_ in commands:
            if words.startswith(f"{noun} "):
                assert words.split()[1] in message


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_code_that_completes_words_names_every_command(shell, capsys):
    assert main(["completion", shell]) == 0
    code = capsys.readouterr().out
    for commands in GROUPS.values():
        for words, *_ in commands:
            assert all(word in code for word in words.split())
    if shell == "bash" and shutil.which("bash"):
        subprocess.run(["bash", "-n"], input=code, text=True, check=True)


@pytest.mark.parametrize("words", [["--help"], ["env", "--help"], ["--version"]])
def test_the_help_loads_no_command(words):
    script = (
        "import runpy, sys\n"
        f"sys.argv = ['lachesis', *{words!r}]\n"
        "try:\n    runpy.run_module('lachesis.cli.main', run_name='__main__')\n"
        "except SystemExit: pass\n"
        "heavy = {'pydantic', 'httpx', 'yaml', 'polars', 'lachesis.cli.commands'}\n"
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], env=os.environ, capture_output=True, text=True, check=True
    )
    assert done.stderr.strip() == "[]"
