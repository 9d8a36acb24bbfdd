"""Measure the time from the submission of a run until its services are healthy, by stage, and
until it has made its first step.

python bench/launch_time.py [--repeat 3]
"""

import argparse
import statistics
import time

from table import show

from lachesis.base import waiting
from lachesis.base.timestamps import seconds_between
from lachesis.config.launch_spec import LaunchSpec
from lachesis.operations.launches import start_run
from lachesis.operations.runs import get_run, stop_run
from lachesis.prefect_client import background_serve, stop
from lachesis.prefect_client.resources import PrefectApi
from lachesis.runs.store import RunStore
from lachesis.tiny_model import build

OLD_SLEEPS_S = 135.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=3)
    args = parser.parse_args()
    build.ensure_tiny_model(build.TinyModelRecipe())
    started = time.monotonic()
    with background_serve.LauncherProcess():
        serving = time.monotonic() - started
        measured = [time_launch(RunStore()) for _ in range(args.repeat)]
    rows = [["lachesis serve until ready", f"{serving:.1f}", "", ""]]
    for name in measured[0]:
        value = statistics.median(seconds_by_name[name] for seconds_by_name in measured)
        target = {"submit to flow start": "3", "submit to all healthy": "27"}.get(name, "")
        ratio = f"{OLD_SLEEPS_S / value:.1f}" if name == "submit to all healthy" else ""
        rows.append([name, f"{value:.1f}", target, ratio])
    show(
        "launch",
        ["what (seconds, median)", "measured", "target", "times faster than the old sleeps"],
        rows,
    )


def time_launch(store: RunStore) -> dict[str, float]:
    """Launch, wait until healthy, stop; seconds since submission and of every task."""
    settings = {"tinker.use_wandb": False}
    record = start_run(store, LaunchSpec(environment="arithmetic", steps=100000, settings=settings))
    run_id = record.run_id
    waiting.wait_until(
        lambda: get_run(store, run_id).status == "running" or get_run(store, run_id).has_ended,
        timeout_s=120,
    )
    record = get_run(store, run_id)
    assert record.status == "running", record.error
    assert record.started_at is not None
    assert record.healthy_at is not None
    times = {"submit to flow start": seconds_between(record.created_at, record.started_at)}
    times["submit to all healthy"] = seconds_between(record.created_at, record.healthy_at)
    metrics = store.dir(run_id).metrics
    waiting.wait_until(lambda: metrics.exists() and metrics.stat().st_size > 0, timeout_s=60)
    times["submit to first step"] = seconds_between(record.created_at)
    times |= read_task_times(record.flow_run_id or "")
    stopped = time.monotonic()
    stop_run(store, run_id)
    waiting.wait_until(lambda: get_run(store, run_id).has_ended, timeout_s=60)
    stop.wait_until_gone(store, record)
    times["stop to all gone"] = time.monotonic() - stopped
    return times


def read_task_times(flow_run_id: str) -> dict[str, float]:
    """Seconds of each waiting task, as the Prefect server has recorded them."""
    time.sleep(5)  # task states reach the server late
    tasks = PrefectApi()._request(
        "POST", "/task_runs/filter", {"flow_runs": {"id": {"any_": [flow_run_id]}}}
    )
    durations = {
        task["name"]: task["total_run_time"]
        for task in sorted(tasks, key=lambda task: task["start_time"] or "")
    }
    return {f"  {name}": seconds for name, seconds in durations.items() if name.startswith("wait")}


if __name__ == "__main__":
    main()
