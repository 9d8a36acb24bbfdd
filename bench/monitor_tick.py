"""Measure the seconds and memory of a monitor's tick, and its growth of Prefect's database.

It does so with 25, 50 and 100 active runs. The runs are records with metrics of 300 steps, and one
simulated server answers for their services. The Prefect server, its database, the runner and the
flow runs of the ticks are real.
"""

import http.server
import json
import multiprocessing
import os
import resource
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

import httpx
from table import show

from lachesis.base.timestamps import now_iso
from lachesis.base.waiting import wait_until
from lachesis.config import run_config as run_config
from lachesis.config.launch_spec import LaunchSpec
from lachesis.monitor.tick import Monitor
from lachesis.prefect_client.background_serve import LauncherProcess
from lachesis.runs.metrics import MetricsFile
from lachesis.runs.record import RunRecord, ServiceRecord
from lachesis.runs.store import RunStore

STEPS, TICKS = 300, 20
TARGETS = {"seconds": 5.0, "MiB": 300.0, "KB a tick": 150.0}


class Server(http.server.ThreadingHTTPServer):
    request_queue_size = 512  # one port for what are 300 in real life


class Services(http.server.BaseHTTPRequestHandler):
    """Trainer, API and engine of every run."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        answer = json.dumps(
            {"waiting_for": "rollouts", "since": time.time(), "queue_size": 0}
        ).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: object) -> None:
        pass


def start_services() -> tuple[multiprocessing.Process, int]:
    """Start a simulated server in a process of its own, as services of real runs are, and return
    its port.
    """
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.Process(target=serve, args=(theirs,), daemon=True)
    process.start()
    return process, ours.recv()


def serve(pipe: Connection) -> None:
    with Server(("127.0.0.1", 0), Services) as server:
        pipe.send(server.server_address[1])
        server.serve_forever()


def post(url: str, body: dict[str, object]) -> dict[str, str]:
    """Return the answer; ask again after a 503, because SQLite allows one writer at a time."""
    while (answer := httpx.post(url, json=body)).status_code == 503:
        time.sleep(0.1)
    answer.raise_for_status()
    return dict(answer.json())


def make_runs(store: RunStore, url: str, port: int, first: int, count: int) -> None:
    flow = httpx.post(f"{url}/flows/", json={"name": "bench"}).json()["id"]
    config = run_config.resolve_run_config("bench", "embedded", {}, model="m").to_yaml()
    for number in range(first, first + count):
        state = {"type": "RUNNING", "name": "Running"}
        flow_run = post(f"{url}/flow_runs/", {"flow_id": flow, "state": state})["id"]
        services = {
            name: ServiceRecord(pid=os.getpid(), port=port, log="x", state="running")
            for name in ("engine", "api", "trainer", "environment")
        }
        record = RunRecord(
            run_id=f"{number:08x}", spec=LaunchSpec(environment="bench"),
            environment="bench", environment_file="x.py",
            profile="embedded", base_model="m",
            total_steps=STEPS, seed=0, wandb_project="p", wandb_run_name="n", status="running",
            phase="training",
            started_at=now_iso(), flow_run_id=flow_run, prefect_api_url=url, services=services,
        )  # fmt: skip
        folder = store.create(record, config)
        metrics = MetricsFile(folder.metrics)
        for step in range(1, STEPS + 1):
            metrics.append(
                step,
                {f"metric/{key}": 0.123456789 for key in range(40)} | {"reward/mean": step / STEPS},
            )


def measure_tick_s(store: RunStore, repeat: int = 3) -> float:
    Monitor(store).tick()  # makes the artifacts
    taken = []
    for _ in range(repeat):
        started = time.monotonic()
        Monitor(store).tick()
        taken.append(time.monotonic() - started)
    return sorted(taken)[repeat // 2]


def measure_database_bytes(home: Path) -> int:
    return sum(file.stat().st_size for file in (home / "prefect").glob("prefect.db*"))


def time_flow_ticks(home: Path, url: str) -> float:
    """Kilobytes that a tick adds, as a flow run in the runner."""
    deployment = httpx.get(f"{url}/deployments/name/monitor/monitor").json()["id"]
    before = measure_database_bytes(home)
    for _ in range(TICKS):
        body = {"state": {"type": "SCHEDULED"}}
        flow_run_id = post(f"{url}/deployments/{deployment}/create_flow_run", body)["id"]
        wait_until(
            lambda flow_run_id=flow_run_id: (
                httpx.get(f"{url}/flow_runs/{flow_run_id}").json()["state"]["type"] == "COMPLETED"
            ),
            60,
        )
    return (measure_database_bytes(home) - before) / 1024 / TICKS


def make_row(what: str, measured: float, target: float, digits: int = 0) -> list[object]:
    return [what, f"{measured:.{digits}f}", f"{target:.0f}", f"{target / max(measured, 1e-9):.1f}"]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        os.environ.update(LACHESIS_HOME=folder, LACHESIS_MONITOR_INTERVAL_S="3600")
        server, port = start_services()
        store, rows, num_made = RunStore(home), [], 0
        with LauncherProcess():
            url = json.loads((home / "server.json").read_text())["api_url"]
            for count in (25, 50, 100):
                make_runs(store, url, port, num_made, count - num_made)
                num_made = count
                took = measure_tick_s(store)
                rows.append(
                    make_row(f"tick with {count} runs (s)", took, TARGETS["seconds"], digits=2)
                )
            memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            rows.append(make_row("memory of this process (MiB)", memory, TARGETS["MiB"]))
            grown = time_flow_ticks(home, url)
            rows.append(
                make_row(f"database, mean of {TICKS} ticks (KB)", grown, TARGETS["KB a tick"])
            )
        server.terminate()
    show("monitor", ["what", "measured", "target", "target / measured"], rows)


if __name__ == "__main__":
    main()
