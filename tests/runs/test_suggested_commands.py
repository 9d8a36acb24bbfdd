"""A suggested command, pasted into a fresh shell in another folder, means what its run had."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lachesis.runs.suggested_commands import advise_new_run, format_repeat, format_test
from tests.environments import sums
from tests.harness.command_line import parse_command
from tests.harness.home import make_record

HOSTILE = 'it\'s $HOME `id` "q" \\ ; touch pwned\n#ü'
SETTINGS: dict[str, Any] = {
    "tinker.wandb_group": HOSTILE,
    "tinker.stop_tokens": [HOSTILE, "7"],
    "tinker.chat_template_kwargs": {"thinking": False},
    "env.group_size": 8,
}


@pytest.fixture
def record(tmp_path):
    """A run of a file in a folder with a hostile name, with hostile settings."""
    file = tmp_path / "my $(touch pwned) 'sums'" / "sums task.py"
    file.parent.mkdir()
    file.write_text(Path(sums.__file__).read_text())
    return make_record(
        SETTINGS, environment="sums task", environment_file=str(file), base_model="m; touch pwned"
    )


def run_in_shell(command, folder, path):
    """Return the output of the command in a shell that has just been opened in another folder."""
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir(exist_ok=True)
    env = os.environ | {"PATH": f"{path}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", command], env=env, cwd=elsewhere, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert not list(folder.rglob("pwned"))
    return done.stdout


def read_words(command, folder):
    """Return the words that `lachesis` gets from a shell."""
    program = folder / "bin" / "lachesis"
    program.parent.mkdir(exist_ok=True)
    program.write_text(f"#!{sys.executable}\nimport json, sys\nprint(json.dumps(sys.argv[1:]))\n")
    program.chmod(0o755)
    words: list[str] = json.loads(run_in_shell(command, folder, program.parent))
    return words


def read_settings(words):
    """Return the values that the command line reads from the words, by field."""
    edits = parse_command(words).edits
    return dict(word.split("=", 1) for word in edits)


def format_value(value):
    return value if isinstance(value, str) else json.dumps(value)


def test_the_shell_gives_the_command_what_the_run_had(record, tmp_path):
    texts = {name: format_value(value) for name, value in SETTINGS.items()}
    advice = advise_new_run(record, 3, ["tinker.lora_rank"])
    (new_run,) = re.findall(r"`(lachesis train .*)`, or rl_", advice, re.DOTALL)
    for command, verb in [
        (format_repeat(record), "train"),
        (format_test(record), "test"),
        (new_run, "train"),
    ]:
        words = read_words(command, tmp_path)
        assert words == shlex.split(command.replace("\\\n", " "))[1:]
        parsed = parse_command(words)
        assert (parsed.command, parsed.environment) == (verb, record.environment_file)
        assert read_settings(words).items() >= texts.items()
    assert parse_command(words).start_from == f"{record.run_id}@3"


def test_the_repeated_run_is_accepted_with_the_same_settings(record, tmp_path):
    changed = record.model_copy(update={"base_model": "tiny"})
    command = format_repeat(changed) + " --dry-run --json"
    answer = json.loads(run_in_shell(command, tmp_path, Path(sys.executable).parent))
    assert answer["set_fields"].items() >= SETTINGS.items()
