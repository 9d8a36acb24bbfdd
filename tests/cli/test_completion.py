"""Shells complete commands, runs, environments and fields, as argcomplete asks for them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lachesis.cli.main import main
from lachesis.runs.store import RunStore
from tests.records import make_record


@pytest.fixture
def complete(clean_environment: Path) -> Callable[[str], list[str]]:
    """Return the words that could follow a command line, as a shell asks for them."""
    RunStore(clean_environment).create(make_record(run_id="0123abcd"))

    def list_words(line: str) -> list[str]:
        env = {
            **os.environ,
            "_ARGCOMPLETE": "1",
            "COMP_LINE": line,
            "COMP_POINT": str(len(line)),
            "IFS": "\v",
            "_ARGCOMPLETE_IFS": "\v",
        }
        command = [sys.executable, "-m", "lachesis.cli.main"]
        script = '"$@" 8>&1 9>&2 1>/dev/null 2>&1'
        done = subprocess.run(
            ["bash", "-c", script, "bash", *command],
            env=env,
            capture_output=True,
            text=True,
            check=False,
        )
        return [word.strip() for word in done.stdout.split("\v")]

    return list_words


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("lachesis comp", "compare"),
        ("lachesis status 0", "0123abcd"),
        ("lachesis compare @", "@last"),
        ("lachesis train arith", "arithmetic"),
        ("lachesis train arithmetic --wa", "--watch"),
        ("lachesis train arithmetic --set learning_r", "learning_rate="),
        ("lachesis train arithmetic --set data_s", "data_seed="),
        ("lachesis train arithmetic --profile e", "embedded"),
        ("lachesis runs --sort he", "held-out"),
    ],
)
def test_a_word_is_completed(complete: Callable[[str], list[str]], line: str, word: str) -> None:
    assert word in complete(line)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_code_for_a_shell(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    code = capsys.readouterr().out
    assert "lachesis" in code
    if shell == "bash" and shutil.which("bash"):
        subprocess.run(["bash", "-n"], input=code, text=True, check=True)
