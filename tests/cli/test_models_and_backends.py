"""`lachesis model memory`, and `lachesis backend install` where it must refuse."""

import json

import pytest

from lachesis.cli.main import main


def test_the_memory_of_a_model_is_forecast(random_model, capsys):
    assert main(["model", "memory", random_model, "--rank", "8", "--tokens", "128", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["fits"] is True
    assert 0 < answer["needed_gib"] < answer["free_gib"]
    assert answer["use"].endswith("float32, rank 8, 128 tokens a sequence")
    # A card that is too small: the command fails, and says what would fit.
    assert main(["model", "memory", random_model, "--gib", "0.001"]) == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert "of 0.0 GiB on a card; " in shown


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["install", "tuft"], "there is no back end tuft to install; allowed: skyrl. TuFT and"),
        (
            ["install", "skyrl", "--python", "/bin/false"],
            "skyrl needs Python 3.12 or newer, and /bin/false; name another one with --python",
        ),
    ],
)
def test_what_cannot_be_installed_is_named(words, message, capsys):
    assert main(["backend", *words]) == 1
    assert message in " ".join(capsys.readouterr().err.split())
