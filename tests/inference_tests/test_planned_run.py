"""The pace of earlier runs."""

from typing import Any

from lachesis.inference_tests.forecast import PlannedRun
from lachesis.inference_tests.planned_run import MIN_TIMED_STEPS, find_earlier_step_time
from lachesis.runs.metrics import MetricsFile
from lachesis.runs.store import RunStore
from tests.harness.home import make_record

SIZES: dict[str, Any] = {
    "total_steps": 100,
    "batch_size": 8,
    "base_model": "m",
    "profile": "embedded",
}


def test_a_run_that_cannot_be_read_is_passed_over(tmp_path, monkeypatch):
    store = RunStore(tmp_path)
    values = {"environment": "e", "environment_file": "e.py", "seed": 0, "fingerprint": "f"}
    values |= {"wandb_project": "p", "wandb_run_name": "n", **SIZES}
    for day, run_id in ((1, "0123abcd"), (2, "4567abcd")):
        own = {"run_id": run_id, "created_at": f"2026-01-0{day}T00:00:00+00:00"}
        store.create(make_record(**{**values, **own}))
    for step in range(1, MIN_TIMED_STEPS + 1):
        MetricsFile(store.dir("0123abcd").metrics).append(step, {"time/step": 2.0})
    read = MetricsFile.read

    def read_if_allowed(metrics):
        if metrics.path.parent.name == "4567abcd":
            raise PermissionError(13, "Permission denied", str(metrics.path))
        return read(metrics)

    monkeypatch.setattr(MetricsFile, "read", read_if_allowed)
    assert find_earlier_step_time(tmp_path, "f", PlannedRun(group_size=4, **SIZES)) == 2.0
