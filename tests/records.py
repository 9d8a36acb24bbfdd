"""A record of a run, for tests to which most of its fields do not matter."""

from __future__ import annotations

from typing import Any

from lachesis.config.launch_spec import LaunchSpec
from lachesis.config.run_config import resolve_run_config
from lachesis.runs.record import RunRecord
from lachesis.runs.store import RunStore


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


def create_run(store: RunStore, **values: Any) -> RunRecord:
    """Create a run with a new id and a valid configuration, and return its record."""
    record = make_record(run_id=store.new_id(), **values)
    config = resolve_run_config("sums", "embedded", {}, model="m")
    store.create(record, config.to_yaml())
    return record
