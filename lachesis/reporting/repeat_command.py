"""Write the command that starts a run once more with the same settings."""

from __future__ import annotations

import json
import shlex
from typing import Any

from lachesis.runs.record import RunRecord

# Settings that options of their own give.
SEED_FIELD = "tinker.seed"


def make_repeat_command(record: RunRecord) -> str:
    """Return the command with all settings that were given at the start, an option per line.

    It needs nothing of this home, except files that a setting names.
    """
    options = [f"--profile {shlex.quote(record.profile)}", f"--seed {record.seed}"]
    if model := record.parameters.get("model"):
        options.append(f"--model {shlex.quote(str(model))}")
    if record.forked_from:
        options.append(f"--from {shlex.quote(record.forked_from)}")
    for key, value in record.set_fields.items():
        if key != SEED_FIELD:
            options.append(f"--set {shlex.quote(f'{key}={_write_value(value)}')}")
    lines = [f"lachesis train {shlex.quote(record.environment)}", *options]
    return " \\\n  ".join(lines)


def _write_value(value: Any) -> str:
    if isinstance(value, str):
        return value
    return json.dumps(value)
