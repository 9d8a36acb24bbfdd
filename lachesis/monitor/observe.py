"""One look at the living runs: their processes, what their services answer, and what they have written. All at the same
time."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from dataclasses import dataclass, field
from typing import Any

import httpx
import psutil

from lachesis.base.errors import LachesisError
from lachesis.config.run_config import RunConfig
from lachesis.config.schema import LimitsSection
from lachesis.runs.budgets import BudgetUsage, compute_budget_usage
from lachesis.runs.environment_counts import read_all_counts
from lachesis.runs.metrics import MetricsFile
from lachesis.runs.store import RunDir, RunRecord, RunStore

ANSWER_S = 2.0
AT_ONCE = 32
"""Runs that are asked at the same time. The client looks through all that wait at each answer, so many would cost their
square."""
STEPS = 60
"""Last steps that are read of each run; a long one has thousands."""
FIRST_STEPS = 20
Json = dict[str, Any]


@dataclass
class Look:
    """What was seen of one run. An answer that did not come is None; `states` is the system's word for each process."""

    record: RunRecord
    folder: RunDir
    limits: LimitsSection = field(default_factory=LimitsSection)
    config: RunConfig | None = None
    """None when it cannot be read."""
    states: dict[str, str] = field(default_factory=dict)
    trainer: Json | None = None
    api: Json | None = None
    engine: bool | None = None
    tally: Json | None = None
    """What the environments of this attempt have counted. The files of the attempt before lie there
    until its processes write."""
    steps: list[Json] = field(default_factory=list)
    """The last ones."""
    first: list[Json] = field(default_factory=list)
    problem: str | None = None
    """What could not be looked at, so that policies and budgets may not be kept."""
    at: float = 0.0

    @property
    def spent(self) -> BudgetUsage:
        return compute_budget_usage(self.record, self.steps[-1] if self.steps else {}, live=(self.trainer or {}).get("spent"))


def look_at(store: RunStore, records: list[RunRecord]) -> list[Look]:
    """In the order of the records. A run whose files cannot be read is seen with what there is."""
    looks = [look_at_files(store, record) for record in records]
    asyncio.run(_ask_all([look for look in looks if not look.record.ended]))
    return looks


def look_at_files(store: RunStore, record: RunRecord) -> Look:
    """Return what the run's files and processes show, without asking its services."""
    look = Look(record, store.dir(record.run_id))
    try:
        _read(look)
    except Exception as error:  # one damaged run must not hide the others
        look.problem = f"its files cannot be read: {error}"
    return look


def _read(look: Look) -> None:
    look.at = time.time()
    pids = {"flow": look.record.flow_pid} | {name: service.pid for name, service in look.record.services.items()}
    look.states = {name: process_state(pid) for name, pid in pids.items()}
    look.tally = read_all_counts(look.folder.counters_files, since=look.record.attempt_since)
    with contextlib.suppress(OSError):
        metrics = MetricsFile(look.folder.metrics)
        look.steps, look.first = metrics.tail(STEPS), metrics.head(FIRST_STEPS)
    try:
        look.config = RunConfig.from_yaml(look.folder.config)
        look.limits = look.config.limits
    except LachesisError as error:
        look.problem = f"its budgets and policies are not kept: {error}"


def process_state(pid: int | None) -> str:
    """psutil's word, such as running, sleeping or stopped; "gone" when there is no such process."""
    try:
        return str(psutil.Process(pid).status()) if pid else "gone"
    except (psutil.Error, ValueError, OverflowError):  # the latter for a number that is no process id
        return "gone"


async def _ask_all(looks: list[Look]) -> None:
    limits, places = httpx.Limits(max_connections=None, max_keepalive_connections=0), asyncio.Semaphore(AT_ONCE)

    async def ask(look: Look) -> None:
        async with places:
            await _ask(client, look)

    async with httpx.AsyncClient(timeout=ANSWER_S, trust_env=False, limits=limits) as client:
        await asyncio.gather(*map(ask, looks))


async def _ask(client: httpx.AsyncClient, look: Look) -> None:
    look.trainer, look.api, engine = await asyncio.gather(
        _json(client, look, "trainer", "/health"),
        _json(client, look, "api", "/counts"),
        _json(client, look, "engine", "/api/v1/healthz"),
    )
    look.engine = None if "engine" not in look.record.services else engine is not None
    look.at = time.time()


async def _json(client: httpx.AsyncClient, look: Look, service: str, path: str) -> Json | None:
    """The answer; {} for one that is no JSON object, as also a refusal shows that somebody is there."""
    port = getattr(look.record.services.get(service), "port", None)
    if port is None:
        return None
    try:
        answer = await client.get(f"http://127.0.0.1:{port}{path}")
        found = answer.json()
    except (json.JSONDecodeError, UnicodeDecodeError):
        return {}
    except Exception:  # nobody answers, or the port is none
        return None
    return found if isinstance(found, dict) else {}
