"""Homes that earlier versions made open and report; tests/e2e/test_compatibility.py resumes their
runs.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from lachesis.runs import export
from lachesis.service import LachesisService
from tests.compatibility.homes import BEFORE_PACKAGES, unpack_home


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("earlier")


@pytest.fixture(scope="module")
def run_ids(home: Path) -> dict[str, str]:
    """The id of the archived home's run by its status."""
    return {
        status: record["run_id"] for status, record in unpack_home(BEFORE_PACKAGES, home).items()
    }


def test_its_runs_are_listed_with_their_states(home: Path, run_ids: dict[str, str]) -> None:
    listed = {record.run_id: record.status for record in LachesisService(home).list_runs()}
    assert listed == {run_ids["completed"]: "completed", run_ids["stopped"]: "stopped"}


def test_its_runs_show_steps_checkpoints_and_held_out_results(
    home: Path, run_ids: dict[str, str]
) -> None:
    status = LachesisService(home).get_status(run_ids["completed"])
    assert (status.progress.step, status.checkpoints) == (6, [2, 6])
    assert [point.step for point in status.held_out_curve] == [0, 6]
    results = LachesisService(home).get_results(run_ids["completed"])
    assert results.final_metrics["step"] == 6
    assert results.held_out_intervals["after"]["items"] == 63


@pytest.mark.parametrize("status", ["completed", "stopped"])
def test_its_runs_are_reported(
    home: Path, run_ids: dict[str, str], tmp_path: Path, status: str
) -> None:
    page = LachesisService(home).write_report(run_ids[status], tmp_path)[0].read_text()
    assert run_ids[status] in page
    assert "reward" in page


def test_its_weights_are_found_and_exported(
    home: Path, run_ids: dict[str, str], tmp_path: Path
) -> None:
    folder = tmp_path / "adapter"
    export.export(
        LachesisService(home).get_run(run_ids["completed"]),
        LachesisService(home).store.dir(run_ids["completed"]),
        folder,
        verify=False,
    )
    assert (folder / "adapter_model.safetensors").stat().st_size == 23_680
