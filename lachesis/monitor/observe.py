"""Observe all living runs at once: their processes, their services' answers, and their files."""

import asyncio
import contextlib
import json
import time
from dataclasses import dataclass, field

import httpx
import psutil

from lachesis.base.errors import LachesisError
from lachesis.base.http_client import open_async_service_client
from lachesis.base.json_text import Json
from lachesis.config.run_config import RunConfig
from lachesis.config.run_fields import LimitsSection
from lachesis.runs.environment_counters import find_blocked_line, read_all_counts
from lachesis.runs.folder import RunDir
from lachesis.runs.metrics import MetricsFile
from lachesis.runs.record import RunRecord
from lachesis.runs.store import RunStore, read_effective_config
from lachesis.spending.budgets import BudgetUsage, compute_budget_usage

RESPONSE_TIMEOUT_S = 2.0
# Runs whose services are queried at the same time. The HTTP client searches all waiting requests at
# each answer, so its cost grows with the square of this number.
MAX_CONCURRENT_RUNS = 32
# Last steps that are read of each run; a long run has thousands.
MAX_LAST_STEPS = 60
MAX_FIRST_STEPS = 20


@dataclass
class Observation:
    """What was observed of one run. An answer that did not arrive is None."""

    record: RunRecord
    run_dir: RunDir
    limits: LimitsSection = field(default_factory=LimitsSection)
    config: RunConfig | None = None
    """The configuration of the run, or None if it cannot be read."""
    process_states: dict[str, str] = field(default_factory=dict)
    trainer_health: Json | None = None
    api_counts: Json | None = None
    is_engine_alive: bool | None = None
    environment_counts: Json | None = None
    """What the environments of this attempt have counted. None while only the files of an earlier
    attempt exist.
    """
    blocked_at: str | None = None
    """Where the blocked event loop of an environment stands."""
    last_steps: list[Json] = field(default_factory=list)
    """Metrics of the run's last steps, in order."""
    first_steps: list[Json] = field(default_factory=list)
    problem: str | None = None
    """What could not be observed, so that policies and budgets may not be enforced."""
    observed_at: float = 0.0

    @property
    def budget_usage(self) -> BudgetUsage:
        return compute_budget_usage(
            self.record,
            self.last_steps[-1] if self.last_steps else {},
            live=(self.trainer_health or {}).get("spent"),
        )


def observe_runs(store: RunStore, records: list[RunRecord]) -> list[Observation]:
    """Observe the runs and return one observation for each, in the order of the records.

    A run whose files cannot be read gets an observation with what is available.
    """
    observations = [observe_files(store, record) for record in records]
    asyncio.run(
        _query_all_services(
            [observation for observation in observations if not observation.record.has_ended]
        )
    )
    return observations


def observe_files(store: RunStore, record: RunRecord) -> Observation:
    """Observe a run by its files and processes, without querying its services."""
    observation = Observation(record, store.dir(record.run_id))
    try:
        _read_files(observation)
    except Exception as error:  # one damaged run must not hide the others
        observation.problem = f"its files cannot be read: {error}"
    return observation


def _read_files(observation: Observation) -> None:
    """Read processes, counts, metrics and configuration of a run into the observation."""
    observation.observed_at = time.time()
    pids = {"flow": observation.record.flow_pid} | {
        name: service.pid for name, service in observation.record.services.items()
    }
    observation.process_states = {name: read_process_state(pid) for name, pid in pids.items()}
    counters_files = observation.run_dir.counters_files
    attempt_start = observation.record.attempt_start_unix_s
    observation.environment_counts = read_all_counts(counters_files, since=attempt_start)
    observation.blocked_at = find_blocked_line(counters_files, since=attempt_start)
    with contextlib.suppress(OSError):
        metrics = MetricsFile(observation.run_dir.metrics)
        observation.last_steps, observation.first_steps = (
            metrics.tail(MAX_LAST_STEPS),
            metrics.head(MAX_FIRST_STEPS),
        )
    try:
        observation.config = read_effective_config(observation.run_dir)
        observation.limits = observation.config.limits
    except LachesisError as error:
        observation.problem = f"its budgets and policies are not enforced: {error}"


def read_process_state(pid: int | None) -> str:
    """Return the state of a process as psutil names it, or "gone" if there is no such process."""
    try:
        if pid:
            return str(psutil.Process(pid).status())
        return "gone"
    except (psutil.Error, ValueError, OverflowError):
        # ValueError: the number is not a valid process id
        return "gone"


async def _query_all_services(observations: list[Observation]) -> None:
    """Ask the services of all runs side by side, of a limited number of runs at a time."""
    connection_limits, semaphore = (
        httpx.Limits(max_connections=None, max_keepalive_connections=0),
        asyncio.Semaphore(MAX_CONCURRENT_RUNS),
    )

    async def query_in_turn(observation: Observation) -> None:
        async with semaphore:
            await _query_services(client, observation)

    async with open_async_service_client(
        timeout=RESPONSE_TIMEOUT_S, limits=connection_limits
    ) as client:
        await asyncio.gather(*map(query_in_turn, observations))


async def _query_services(client: httpx.AsyncClient, observation: Observation) -> None:
    """Ask trainer, rollout API and engine of one run how they are."""
    observation.trainer_health, observation.api_counts, engine_body = await asyncio.gather(
        _get_json(client, observation, "trainer", "/health"),
        _get_json(client, observation, "api", "/counts"),
        _get_json(client, observation, "engine", "/api/v1/healthz"),
    )
    if "engine" not in observation.record.services:
        observation.is_engine_alive = None
    else:
        observation.is_engine_alive = engine_body is not None
    observation.observed_at = time.time()


async def _get_json(
    client: httpx.AsyncClient, observation: Observation, service: str, path: str
) -> Json | None:
    """Return the JSON object that a service answers, or None if it does not answer.

    Any other answer, including an error status, returns an empty object: something is listening.
    """
    port = getattr(observation.record.services.get(service), "port", None)
    if port is None:
        return None
    try:
        response = await client.get(f"http://127.0.0.1:{port}{path}")
        body = response.json()
    except (json.JSONDecodeError, UnicodeDecodeError):
        return {}
    except Exception:  # nothing answers, or the port is not valid
        return None
    if isinstance(body, dict):
        return body
    return {}
