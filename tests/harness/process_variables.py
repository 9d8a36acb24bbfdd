"""An environment that writes down the variables of each process which imports it."""

import json
from pathlib import Path

import pytest

NOSY = """
import json as _json, os as _os
with open(_os.environ["NOSY_FILE"], "a") as _out:
    _out.write(_json.dumps([dict(_os.environ), open("/proc/self/environ").read()]) + "\\n")
"""
KEYS = ("OPENAI_API_KEY", "OPENROUTER_API_KEY", "WANDB_API_KEY", "TINKER_API_KEY")


def make_nosy(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this environment write its variables beside its file, and set all keys, to be found
    there.
    """
    for name in KEYS:
        monkeypatch.setenv(name, f"secret-of-{name}")
    monkeypatch.setenv("NOSY_FILE", str(file.with_name("environ.jsonl")))
    monkeypatch.setenv("LACHESIS_ENVIRONMENT_VARIABLES", "NOSY_FILE")
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    text = file.read_text()
    marker = "from __future__ import annotations\n"
    head, separator, rest = text.partition(marker)
    file.write_text(head + separator + NOSY + rest if separator else NOSY + text)


def read_variables(file: Path, *, endpoint_key: str = "") -> list[dict[str, str]]:
    """Return the variables of each process; none may hold a key.

    Only what the system keeps of a process's start may show the key of the endpoint that it calls.
    """
    lines = [json.loads(line) for line in file.with_name("environ.jsonl").read_text().splitlines()]
    for variables, at_start in lines:
        assert "secret-of" not in str(variables)
        assert "secret-of" not in at_start.replace(endpoint_key or "no key", "")
    return [variables for variables, _ in lines]
