"""Measure how long an agent waits for each tool, and for the start of each surface.

The tools are called in-process on a home with 100 environments and 200 runs.

    python bench/tool_latency.py [--repeat 200]

The ratios are against the project's own targets: 150 ms for the 95th percentile of a call, 3 s from
the start of the MCP server to its list of tools, 0.4 s for `lachesis --help`, 2 s from the call of
a start to the run id.
"""

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import httpx
from table import show

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENTS, RUNS, LIVING = 100, 200, 4
TARGET_MS, TARGET_TOOLS_S, TARGET_HELP_S, TARGET_START_S = 150.0, 3.0, 0.4, 2.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=200)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="lachesis-bench-") as folder:
        os.environ["LACHESIS_HOME"] = f"{folder}/home"
        os.environ["LACHESIS_ENVIRONMENTS"] = str(make_environments(Path(folder) / "environments"))

        from lachesis.prefect_client.background_serve import LauncherProcess

        with LauncherProcess():
            living = make_runs()
            rows = measure_tools(living, args.repeat)
            rows.append(measure_start())
    rows += [
        [
            "MCP: start to list of tools (s)",
            *make_seconds_row([asyncio.run(time_mcp_start()) for _ in range(5)], TARGET_TOOLS_S),
        ],
        ["lachesis --help (s)", *make_seconds_row([time_help() for _ in range(10)], TARGET_HELP_S)],
    ]
    title = f"agents ({ENVIRONMENTS} environments, {RUNS} runs, {LIVING} of them living)"
    show(
        title, ["what", "median", "95th percentile", "target", "times faster than the target"], rows
    )


def make_environments(folder: Path) -> Path:
    folder.mkdir()
    source = (ROOT / "environments" / "arithmetic.py").read_text()
    for index in range(ENVIRONMENTS):
        text = source.replace('name = "arithmetic"', f'name = "arithmetic{index}"')
        (folder / f"arithmetic{index}.py").write_text(text)
    return folder


def make_runs() -> str:
    """Records with metrics; the living ones are known to the server as scheduled for another day.
    One of these.
    """
    from lachesis.config.launch_spec import LaunchSpec
    from lachesis.prefect_client.resources import PrefectApi
    from lachesis.runs.metrics import MetricsFile
    from lachesis.runs.record import RunRecord
    from lachesis.runs.store import RunStore

    store, api = RunStore(), PrefectApi()
    deployment = api.read_deployment("train", "train") or {}
    for index in range(RUNS):
        run_id = store.new_id()
        record = RunRecord(
            run_id=run_id,
            spec=LaunchSpec(environment="arithmetic"),
            environment="arithmetic",
            environment_file="",
            profile="embedded",
            base_model="tiny",
            total_steps=300,
            seed=0,
            wandb_project="p",
            wandb_run_name=f"arithmetic-{run_id}",
            prefect_api_url=api.url,
            status="pending" if index < LIVING else "completed",
        )
        if index < LIVING:
            later = {
                "type": "SCHEDULED",
                "state_details": {"scheduled_time": "2100-01-01T00:00:00Z"},
            }
            body = {
                "state": later,
                "name": run_id,
                "parameters": {"environment": "arithmetic", "run_id": run_id},
            }
            answer = httpx.post(
                f"{api.url}/deployments/{deployment['id']}/create_flow_run", json=body
            )
            record = record.model_copy(
                update={"flow_run_id": answer.raise_for_status().json()["id"]}
            )
            living = run_id
        metrics = MetricsFile(store.create(record).metrics)
        metrics.path.write_text(
            "".join(f'{{"step": {n}, "time": {n}.5, "reward/mean": 0.5}}\n' for n in range(1, 301))
        )
    return living


def measure_tools(living: str, repeat: int) -> list[list[object]]:
    from lachesis.agent_tools.session import AgentSession
    from lachesis.agent_tools.tools import TOOLS, CallContext
    from lachesis.base.json_text import to_compact_json

    os.environ["LACHESIS_STATUS_INTERVAL_S"] = "0"
    call = CallContext(AgentSession("bench"))
    # the first look at an environment imports it in a child; its schema is kept
    for index in range(5):
        TOOLS["rl_select_environment"].run(call, {"name": f"arithmetic{index}"})
    calls: dict[str, Callable[[int], dict[str, object]]] = {
        "rl_list_environments": lambda n: {},
        "rl_select_environment": lambda n: {"name": f"arithmetic{n % 5}"},
        "rl_get_current_config": lambda n: {},
        "rl_edit_config": lambda n: {"field": "total_steps", "value": n + 1},
        "rl_list_runs": lambda n: {},
        "rl_check_status": lambda n: {"run_id": living},
        "rl_get_results": lambda n: {"run_id": living},
        "rl_health_check": lambda n: {},
    }
    rows = []
    for name, arguments in calls.items():
        times = []
        for n in range(repeat):
            started = time.perf_counter()
            answer, error = TOOLS[name].run_safely(call, arguments(n))
            to_compact_json(answer)
            assert error is None, answer
            times.append((time.perf_counter() - started) * 1000)
        rows.append([f"{name} (ms)", *make_row(times, TARGET_MS, 1)])
    return rows


def measure_start() -> list[object]:
    """Return the seconds from the call to the run id; each run is stopped before it begins to
    train.
    """
    from lachesis.agent_tools.session import AgentSession
    from lachesis.agent_tools.tools import TOOLS, CallContext

    call = CallContext(AgentSession("bench"))
    times = []
    for _ in range(5):
        started = time.perf_counter()
        answer = TOOLS["rl_start_training"].run(call, {})
        times.append(time.perf_counter() - started)
        TOOLS["rl_stop_training"].run(call, {"run_id": answer["run_id"]})
    return ["rl_start_training until the run id (s)", *make_seconds_row(times, TARGET_START_S)]


async def time_mcp_start() -> float:
    from mcp import Client, StdioServerParameters

    started = time.perf_counter()
    command = StdioServerParameters(command=sys.executable, args=["-m", "lachesis.cli.main", "mcp"])
    async with Client(command) as client:
        assert (await client.list_tools()).tools
        return time.perf_counter() - started


def time_help() -> float:
    started = time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "lachesis.cli.main", "--help"], check=True, stdout=subprocess.DEVNULL
    )
    return time.perf_counter() - started


def make_seconds_row(times: list[float], target: float) -> list[object]:
    return make_row(times, target, 2)


def make_row(times: list[float], target: float, digits: int) -> list[object]:
    p95 = statistics.quantiles(times, n=20, method="inclusive")[-1]
    return [
        f"{statistics.median(times):.{digits}f}",
        f"{p95:.{digits}f}",
        f"{target:g}",
        f"{target / p95:.1f}",
    ]


if __name__ == "__main__":
    main()
