"""Find how fast an earlier run of the same kind was."""

import statistics
from pathlib import Path

from lachesis.inference_tests.forecast import PlannedRun
from lachesis.runs.metrics import MetricsFile
from lachesis.runs.store import RunStore

MIN_TIMED_STEPS = 10
MAX_RUNS_READ = 20


def find_earlier_step_time(home: Path, fingerprint: str, planned: PlannedRun) -> float | None:
    """Return median seconds per step of the newest run of this code, model and batch size."""
    store = RunStore(home)
    run_kind = (fingerprint, planned.base_model, planned.profile, planned.batch_size)
    similar_runs = [
        record
        for record in store.all()
        if (record.fingerprint, record.base_model, record.profile, record.batch_size) == run_kind
    ]
    for record in similar_runs[:MAX_RUNS_READ]:
        try:
            steps = MetricsFile(store.dir(record.run_id).metrics).read()
        except OSError:
            continue  # A damaged run must not prevent the validation of another one.
        step_times_s = [step["time/step"] for step in steps if step.get("time/step")]
        if len(step_times_s) >= MIN_TIMED_STEPS:
            return float(statistics.median(step_times_s))
    return None
