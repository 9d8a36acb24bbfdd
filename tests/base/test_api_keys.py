"""Where keys are looked for, in which order, and that none is shown."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import keyring
import pytest

from lachesis.base import api_keys
from lachesis.base.api_keys import KEYRING, adopt_keys, find_key, read_key
from lachesis.base.errors import MissingKeyError
from lachesis.base.secrets import redact
from lachesis.config.profiles import check_endpoint, check_profile, list_missing_keys

FILE_KEY, KEYRING_KEY = "tml-in-the-file", "tml-in-the-keyring"
BACKEND = "tests.harness.keyring.FileKeyring"


@pytest.fixture
def hermes_file(tmp_path, monkeypatch):
    file = tmp_path / ".hermes" / ".env"
    file.parent.mkdir()
    monkeypatch.setenv("HERMES_HOME", str(file.parent))
    for name in api_keys.STORED_NAMES:
        monkeypatch.delenv(name, raising=False)
    return file


@pytest.fixture
def keyring_file(tmp_path, monkeypatch):
    """The file of a keyring that this process and its children use."""
    file = tmp_path / "keyring.json"
    file.write_text("{}")
    monkeypatch.setenv("KEYRING_FILE", str(file))
    monkeypatch.setenv("PYTHON_KEYRING_BACKEND", BACKEND)
    monkeypatch.setattr(api_keys, "_is_keyring_usable", True)
    before = keyring.get_keyring()
    keyring.core.init_backend()
    yield file
    keyring.set_keyring(before)


def test_the_environment_comes_before_the_file_and_the_keyring(
    hermes_file, keyring_file, monkeypatch
):
    assert find_key("TINKER_API_KEY") is None
    keyring_file.write_text(json.dumps({"TINKER_API_KEY": KEYRING_KEY}))
    key = find_key("TINKER_API_KEY")
    assert key is not None
    assert (key.value, key.place) == (KEYRING_KEY, KEYRING)
    hermes_file.write_text(f"# of Hermes\nexport TINKER_API_KEY='{FILE_KEY}'\nOTHER=$HOME\n")
    key = find_key("TINKER_API_KEY")
    assert key is not None
    assert (key.value, key.place) == (FILE_KEY, str(hermes_file))
    monkeypatch.setenv("TINKER_API_KEY", "tml-mine")
    assert read_key("TINKER_API_KEY") == "tml-mine"


def test_a_key_is_not_shown(hermes_file):
    hermes_file.write_text(f"TINKER_API_KEY={FILE_KEY}\n")
    key = find_key("TINKER_API_KEY")
    assert FILE_KEY not in repr(key)
    assert "TINKER_API_KEY" not in os.environ, "programs that share this process would get it"
    assert redact(f"refused: {FILE_KEY}") == "refused: ***"


@pytest.mark.parametrize("owner", ["the environment", "the keyring"])
def test_a_file_cannot_send_the_key_of_another_place_elsewhere(
    owner, hermes_file, keyring_file, monkeypatch
):
    hermes_file.write_text("TINKER_BASE_URL=http://127.0.0.1:9\n")
    if owner == "the environment":
        monkeypatch.setenv("TINKER_API_KEY", "tml-mine")
    else:
        keyring_file.write_text(json.dumps({"TINKER_API_KEY": KEYRING_KEY}))
    assert find_key("TINKER_BASE_URL") is None
    assert list_missing_keys("custom") == ["TINKER_BASE_URL"]
    monkeypatch.setenv("TINKER_BASE_URL", "http://127.0.0.1:8")
    assert read_key("TINKER_BASE_URL") == "http://127.0.0.1:8"


def test_an_address_comes_with_its_key(hermes_file):
    hermes_file.write_text(
        f"TINKER_BASE_URL=http://127.0.0.1:9\nTINKER_API_KEY={FILE_KEY}\nOPENAI_API_KEY=sk-hermes\n"
    )
    assert list_missing_keys("custom") == []
    assert read_key("OPENAI_API_KEY") == "", "Hermes' own model is not ours to use"


def test_adopted_keys_are_for_children(hermes_file, monkeypatch):
    environ = {**os.environ, "WANDB_API_KEY": "wandb-mine"}
    monkeypatch.setattr(os, "environ", environ)
    hermes_file.write_text(f"TINKER_API_KEY={FILE_KEY}\nTINKER_BASE_URL=http://127.0.0.1:9\n")
    assert adopt_keys() == {
        "TINKER_API_KEY": str(hermes_file),
        "TINKER_BASE_URL": str(hermes_file),
        "WANDB_API_KEY": "the environment",
    }
    assert environ["TINKER_API_KEY"] == FILE_KEY


def test_a_missing_key_names_all_places(hermes_file, keyring_file):
    for check in (lambda: check_profile("tinker"), lambda: check_endpoint(["some/model"])):
        with pytest.raises(MissingKeyError) as raised:
            check()
        assert str(hermes_file) in str(raised.value)
        assert "keyring set lachesis" in str(raised.value)


@pytest.mark.parametrize("state", ["locked", "silent"])
def test_a_keyring_that_does_not_answer_is_asked_once(
    state, hermes_file, keyring_file, monkeypatch
):
    keyring_file.write_text(json.dumps(state))
    monkeypatch.setattr(api_keys, "KEYRING_TIMEOUT_S", 0.5)
    started_at = time.monotonic()
    assert [read_key(name) for name in ("TINKER_API_KEY", "WANDB_API_KEY")] == ["", ""]
    assert time.monotonic() - started_at < 30
    assert Path(f"{keyring_file}.asked").read_text().split() == ["TINKER_API_KEY"]


def test_doctor_shows_places_and_no_value(hermes_file, keyring_file, monkeypatch):
    hermes_file.write_text(f"TINKER_API_KEY={FILE_KEY}\n")
    keyring_file.write_text(json.dumps({"OPENROUTER_API_KEY": KEYRING_KEY}))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    output = _run_doctor("--json")
    for value in (FILE_KEY, KEYRING_KEY):
        assert value not in output + _run_doctor()
    states = {check["name"]: check["found"] for check in json.loads(output)["checks"]}
    assert states["keys of profile tinker"] == f"TINKER_API_KEY in {hermes_file}"
    assert states["keys of profile custom"] == "without TINKER_BASE_URL"
    assert states["key of OpenRouter"] == "OPENROUTER_API_KEY in the system keyring"
    assert states["key of W&B"] == "without WANDB_API_KEY"


def _run_doctor(*options):
    command: list[Any] = [sys.executable, "-m", "lachesis.cli.main", "doctor", *options]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    return answer.stdout + answer.stderr
