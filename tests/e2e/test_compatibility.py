"""Homes that earlier versions made open, report and resume; see tests/compatibility/README.md."""

from __future__ import annotations

import hashlib
import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]
HOMES = Path(__file__).resolve().parents[1] / "compatibility"


def unpack_home(archive: Path, home: Path) -> dict[str, dict[str, Any]]:
    """Add an archived home's runs and models to `home` and return the record of each run by its status."""
    with tarfile.open(archive) as packed:
        packed.extractall(home, filter="fully_trusted")  # the home of a test may link to its models
        names = packed.getnames()
    records = {}
    for path in (home / name for name in names):
        if path.is_file() and path.suffix not in {".safetensors", ".py"}:
            path.write_text(path.read_text().replace("@HOME@", str(home)))
        if path.name == "run.json" and path.parent.parent.name == "runs":
            record = json.loads(path.read_text())
            records[record["status"]] = record
    for manifest in (home / name for name in names if "/checkpoints/step-" in name):
        _describe_files_again(manifest, manifest.parents[1])
    return records


def _describe_files_again(manifest: Path, folder: Path) -> None:
    """Write sizes and checksums into a checkpoint's manifest: an adapter's configuration holds the home's path."""
    checkpoint = json.loads(manifest.read_text())
    for name in checkpoint["files"]:
        content = (folder / name).read_bytes()
        checkpoint["files"][name] = {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content)}
    manifest.write_text(json.dumps(checkpoint))


def read_steps(home: Path, run_id: str) -> list[int]:
    """Return the steps that are in a run's metrics file."""
    lines = (home / "runs" / run_id / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["step"] for line in lines]


def test_a_home_from_before_the_packages_opens_reports_and_resumes(
    cli: Callable[..., Any],
    served_home: Path,
    tmp_path: Path,
    wait_until: Callable[..., Any],
    wait_ended: Callable[..., Any],
) -> None:
    records = unpack_home(HOMES / "home_before_packages.tar.gz", served_home)
    completed, stopped = records["completed"]["run_id"], records["stopped"]["run_id"]

    listed = {run["run_id"]: run["status"] for run in cli("runs")["runs"]}
    assert (listed[completed], listed[stopped]) == ("completed", "stopped")
    status = cli("status", completed)
    assert (status["progress"]["step"], status["checkpoints"]) == (6, [2, 6])
    assert [point["step"] for point in status["held_out_curve"]] == [0, 6]
    results = cli("results", completed)
    assert results["final_metrics"]["step"] == 6
    assert results["held_out_intervals"]["after"]["items"] == 63
    for run_id in (completed, stopped):
        assert run_id in Path(cli("report", run_id)["files"][0]).read_text()
    cli("weights", completed, "--to", str(tmp_path / "adapter"))
    assert (tmp_path / "adapter" / "adapter_model.safetensors").is_file()

    before = read_steps(served_home, stopped)
    assert before == list(range(1, 45))
    cli("resume", stopped)
    wait_until(lambda: len(read_steps(served_home, stopped)) > 46, 120, "a step of the resumed run")
    cli("stop", stopped)
    wait_ended(stopped)
    after = read_steps(served_home, stopped)
    assert after == list(range(1, len(after) + 1))
    record = json.loads((served_home / "runs" / stopped / "run.json").read_text())
    assert (record["status"], record["attempt"]) == ("stopped", 2)
