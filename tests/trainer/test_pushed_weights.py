"""Weights of a real run on a stand-in of the Hub: what arrives there loads as the card says, names
nothing of this machine, and a push that failed is repeated without another export.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lachesis.base.json_text import Json
from lachesis.runs.folder import RunDir
from tests.harness.model_hub import TOKEN, ModelHub, Repository, serve_hub

pytestmark = pytest.mark.timeout(600)
BASE = "me/base"


@pytest.fixture
def hub(random_model):
    """A Hub that has the base model of the run."""
    with serve_hub() as served:
        files = {file.name: file.read_bytes() for file in Path(random_model).iterdir()}
        served.repositories[BASE] = Repository(files=files)
        yield served


@pytest.fixture
def env(hub, tmp_path):
    """The variables of a process that uses this Hub, by its older protocol for large files."""
    return {
        **os.environ,
        "LACHESIS_HOME": str(tmp_path),
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(tmp_path / "hf"),
        "HF_TOKEN": TOKEN,
        "HF_HUB_DISABLE_XET": "1",
    }


@pytest.fixture
def push(trained, env, tmp_path):
    """Push the weights of the run to the Hub by the command; return its answer or its error."""

    def run_command(*options, name="adapter"):
        command = [sys.executable, "-m", "lachesis.cli.main", "export", trained.record.run_id]
        target = ["--to", str(tmp_path / "out"), "--push-to-hub", name]
        done = subprocess.run(
            [*command, *target, *options, "--json"],
            env=env,
            capture_output=True,
            text=True,
            check=False,
        )
        assert TOKEN not in done.stdout + done.stderr
        return dict(json.loads(done.stdout))

    return run_command


def use_base_of_hub(folder):
    """Let the run have been trained from a model of the Hub instead of a folder."""
    record = json.loads(folder.record.read_text())
    folder.record.write_text(json.dumps({**record, "base_model": BASE}))


def run_code_of_card(card, env):
    """Run the Python of a card in a process of its own, and return the class of its model."""
    (code,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    test = "\nprint(type(model).__name__, len(tokenizer('1+2=').input_ids))"
    done = subprocess.run(
        [sys.executable, "-c", code + test], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_an_adapter_arrives_and_loads_as_its_card_says(
    hub, env, push, folder, tmp_path, random_model
):
    use_base_of_hub(folder)
    answer = push()
    assert answer["verified"] is True, answer
    assert answer["pushed"] == {
        "repository": "me/adapter",
        "url": f"{hub.url}/me/adapter",
        "commit": "0" * 40,
        "private": True,
    }
    pushed = hub.repositories["me/adapter"]
    assert pushed.commits == ["Step 6 of run 00000001"]
    assert set(pushed.files) == {
        "README.md", "lachesis.json", "adapter_config.json", "adapter_model.safetensors",
    }  # fmt: skip
    local = tmp_path / "out" / "adapter_model.safetensors"
    assert pushed.files["adapter_model.safetensors"] == local.read_bytes()
    _check_nothing_local(pushed, tmp_path, random_model)
    assert json.loads(pushed.files["lachesis.json"])["step"] == 6
    card = pushed.files["README.md"].decode()
    assert f"base_model: {BASE}" in card
    assert "library_name: peft" in card
    assert "| step of training | 6 of 6 |" in card
    assert "| compared with the trained model | verified: " in card
    assert run_code_of_card(card, env).startswith("PeftModel")


@pytest.mark.long
def test_a_merged_model_needs_no_base_model(
    hub: ModelHub,
    env: dict[str, str],
    push: Callable[..., Json],
    folder: RunDir,
    tmp_path: Path,
    random_model: str,
) -> None:
    refused = push()
    assert refused["code"] == "arguments"
    assert "add --merged" in refused["error"]
    assert not (tmp_path / "out").exists()
    answer = push("--merged", "--public", name="team/whole")
    assert answer["pushed"]["private"] is False, answer
    pushed = hub.repositories["team/whole"]
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(pushed.files)
    _check_nothing_local(pushed, tmp_path, random_model)
    card = pushed.files["README.md"].decode()
    assert "base_model:" not in card
    assert run_code_of_card(card, env)


def _check_nothing_local(pushed, *places):
    for name, content in pushed.files.items():
        for place in (*places, Path.home()):
            assert str(place).encode() not in content, name


def test_a_push_that_failed_is_repeated_without_another_export(hub, push, folder, tmp_path):
    use_base_of_hub(folder)
    hub.refuse("/commit/", 503, times=1)
    failed = push("--no-verify")
    assert failed["code"] == "server_down"
    assert f"the weights are in {tmp_path / 'out'}" in failed["error"]
    adapter = tmp_path / "out" / "adapter_model.safetensors"
    exported_at = adapter.stat().st_mtime_ns
    assert push("--no-verify")["pushed"]["repository"] == "me/adapter"
    assert adapter.stat().st_mtime_ns == exported_at
    assert len(hub.uploads) == 1, "the Hub has the large file already"
    adapter.write_bytes(adapter.read_bytes()[:-1])
    assert push("--no-verify")["code"] == "run_state", "a changed folder is not pushed"


@pytest.mark.parametrize(
    ("part", "status", "name", "code", "words"),
    [
        ("/api/whoami", 401, "adapter", "missing_key", "set HF_TOKEN to a token that may write"),
        ("/api/whoami", 500, "adapter", "server_down", "nothing was pushed"),
        ("nothing", 0, "others/adapter", "missing_key", "check that you may write there"),
        ("nothing", 0, "no name!", "arguments", "is not the name of a repository"),
    ],
)
def test_what_the_hub_refuses_is_explained(hub, push, folder, part, status, name, code, words):
    use_base_of_hub(folder)
    hub.refuse(part, status)
    answer = push("--no-verify", name=name)
    assert answer["code"] == code, answer
    assert words in answer["error"]
    assert not any(repository.commits for repository in hub.repositories.values())


def test_without_a_token_the_sign_in_is_named(push, env, folder):
    use_base_of_hub(folder)
    del env["HF_TOKEN"]
    answer = push("--no-verify")
    assert answer["code"] == "missing_key"
    assert "hf auth login" in answer["error"]
