"""Runs of homes that earlier versions made are resumed; tests/compatibility opens and reports
them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.compatibility.homes import BEFORE_PACKAGES, unpack_home

pytestmark = [pytest.mark.e2e, pytest.mark.matrix, pytest.mark.timeout(600)]


def read_steps(home: Path, run_id: str) -> list[int]:
    """Return the steps that are in a run's metrics file."""
    lines = (home / "runs" / run_id / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["step"] for line in lines]


def test_a_run_from_before_the_packages_is_resumed_and_exported(
    cli: Callable[..., Any],
    served_home: Path,
    tmp_path: Path,
    wait_until: Callable[..., Any],
    wait_ended: Callable[..., Any],
) -> None:
    """Its flow run is not known to the Prefect server, as the archive holds no Prefect data."""
    run_id = unpack_home(BEFORE_PACKAGES, served_home)["stopped"]["run_id"]
    assert read_steps(served_home, run_id) == list(range(1, 45))
    cli("resume", run_id)
    wait_until(lambda: len(read_steps(served_home, run_id)) > 46, 120, "a step of the resumed run")
    cli("stop", run_id)
    wait_ended(run_id)
    steps = read_steps(served_home, run_id)
    assert steps == list(range(1, len(steps) + 1))
    record = json.loads((served_home / "runs" / run_id / "run.json").read_text())
    assert (record["status"], record["attempt"]) == ("stopped", 2)
    cli("weights", run_id, "--to", str(tmp_path / "adapter"))
    assert (tmp_path / "adapter" / "adapter_model.safetensors").is_file()
