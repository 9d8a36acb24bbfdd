"""A record of a run, for tests to which most of its fields do not matter."""

from __future__ import annotations

from typing import Any

from lachesis.config.launch_spec import LaunchSpec
from lachesis.runs.record import RunRecord


def make_record(set_fields: dict[str, Any] | None = None, **changes: Any) -> RunRecord:
    """Return a record that is valid, with these fields changed, of a launch that has set others."""
    values: dict[str, Any] = {
        "run_id": "0123abcd",
        "environment": "sums",
        "environment_file": "sums.py",
        "profile": "embedded",
        "base_model": "m",
        "total_steps": 9,
        "seed": 0,
        "wandb_project": "p",
        "wandb_run_name": "n",
    }
    values |= changes
    spec = LaunchSpec(environment=values["environment"], profile=values["profile"])
    return RunRecord(**{"spec": spec.with_set_fields(set_fields or {}), **values})
