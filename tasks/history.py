"""How fast an earlier run of the same kind was."""

from __future__ import annotations

import statistics
from pathlib import Path

from lachesis.runs.metrics import MetricsFile
from lachesis.runs.store import RunStore
from lachesis.validation.forecast import PlannedRun

LEAST_STEPS = 10
NEWEST = 20


def earlier_pace(home: Path, fingerprint: str, planned: PlannedRun) -> float | None:
    """Median seconds per training step of the newest run of this environment's code on the same model, profile and batch
    size."""
    store = RunStore(home)
    wanted = (fingerprint, planned.base_model, planned.profile, planned.batch_size)
    alike = [
        record for record in store.all() if (record.fingerprint, record.base_model, record.profile, record.batch_size) == wanted
    ]
    for record in alike[:NEWEST]:
        try:
            steps = MetricsFile(store.dir(record.run_id).metrics).read()
        except OSError:
            continue  # one damaged run must not keep another one from being validated
        times = [one["time/step"] for one in steps if one.get("time/step")]
        if len(times) >= LEAST_STEPS:
            return float(statistics.median(times))
    return None
