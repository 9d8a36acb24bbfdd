"""Numbers of the command line have sensible bounds, and a refusal names them."""

import pytest

from lachesis.cli.main import main
from tests.harness.command_line import parse_command


@pytest.mark.parametrize(
    ("words", "allowed"),
    [
        (["demo", "--steps", "0"], "1 to 10000000"),
        (["demo", "--seed", "-1"], "0 to 9007199254740991"),
        (["serve", "--port", "70000"], "1 to 65535"),
        (["serve", "--port", "many"], "1 to 65535"),
        (["logs", "RUN", "-n", "-5"], "1 to 1000000"),
        (["model", "build", "--steps", str(2**70)], "1 to 10000000"),
        (["train", "arithmetic", "--seed", str(2**64)], "0 to 9007199254740991"),
        (["test", "arithmetic", "--steps", "10001"], "1 to 10000"),
        (["test", "arithmetic", "--group-size", "0"], "1 to 1024"),
        (["api", "--port", "0"], "1 to 65535"),
    ],
)
def test_a_number_out_of_bounds_is_refused(capsys, words, allowed):
    with pytest.raises(SystemExit):
        main(words)
    message = capsys.readouterr().err.splitlines()[0]
    assert f"allowed: a whole number from {allowed};" in message
    assert repr(words[-1]) in message


def test_a_number_within_bounds_is_read():
    assert parse_command(["test", "arithmetic", "--steps", "7"]).steps == 7
    assert parse_command(["train", "arithmetic", "--seed", "0"]).seed == 0
