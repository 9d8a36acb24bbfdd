"""Texts of environments and other programs control no cursor, colour or clipboard."""

import re

import pytest
from rich.text import Text

from lachesis.cli import terminal
from lachesis.cli.main import main
from tests.harness.recorded_runs import HOSTILE, RECIPES, record_run

# Control characters but line ends, and characters that turn the direction of writing.
CONTROLS = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")


@pytest.fixture
def hostile_run(store):
    run_id = record_run(store, RECIPES["hostile texts"]).run_id
    log = store.dir(run_id).get_log_file("trainer")
    log.write_text(f"half\rwhole\r\n{HOSTILE}\n")
    return run_id


@pytest.mark.parametrize(
    "words",
    [
        ("runs",), ("status", "RUN"), ("watch", "RUN"), ("compare", "RUN", "RUN"),
        ("rollouts", "RUN"), ("logs", "RUN", "trainer"), ("metrics", "RUN"),
        ("config", "--like", "RUN"),
    ],
)  # fmt: skip
def test_no_command_prints_control_characters(hostile_run, capsys, words):
    main([word.replace("RUN", hostile_run) for word in words])
    printed = capsys.readouterr()
    assert CONTROLS.search(printed.out + printed.err) is None
    if words[0] in ("status", "logs"):
        assert r"\x1b[1A\x1b[2K\x1b]52;c;eA==" in printed.out
    if words[0] == "logs":
        assert printed.out.startswith("half\nwhole\n")


def test_a_terminal_gets_our_own_colours_only(capsys):
    console = terminal.SafeConsole(force_terminal=True, width=80, color_system="standard")
    console.print(Text(HOSTILE, style="red"))
    printed = capsys.readouterr().out
    assert printed.startswith("\x1b[31m")
    assert CONTROLS.search(printed.removeprefix("\x1b[31m").replace("\x1b[0m", "")) is None
