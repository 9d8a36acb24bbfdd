"""Programs that write into one home at once: commands, a tool, and `lachesis serve`.

Each is a process of its own. What a run's flow does is played by the same functions, without its
services.
"""

import json
import os
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from lachesis.base.errors import LachesisError

PER_RUN_USD, PER_DAY_USD = 2.0, 7.0
POLICY = (
    f"agents: {{max_cost_usd_per_run: {PER_RUN_USD}, max_cost_usd_per_day: {PER_DAY_USD}, "
    "require_validation: false}"
)
KEYS = {"TINKER_API_KEY": "set", "TINKER_BASE_URL": "set"}
_launches: dict[bool, Any] = {}


class Writer:
    """A program that performs one action at a time."""

    def __init__(self, home: Path, url: str, deployment: str, models: Path) -> None:
        variables = {
            "LACHESIS_HOME": str(home),
            "PREFECT_API_URL": url,
            "LACHESIS_DEPLOYMENT": deployment,
            "HF_HOME": str(models),
        }
        self._pool = ProcessPoolExecutor(
            1, mp_context=get_context("spawn"), initializer=prepare, initargs=(variables,)
        )

    def begin(self, action: str, run_id: str, number: int) -> Future[str]:
        """Begin an action, whose result is what has come of it, as a word."""
        return self._pool.submit(perform, action, run_id, number)

    def close(self) -> None:
        self._pool.shutdown()


def prepare(variables: dict[str, str]) -> None:
    """Make this process a program of the home, which gives Prefect little time to answer."""
    os.environ |= variables
    from lachesis.prefect_client import api_requests, background_serve, pending_submissions

    api_requests.TIMEOUT_S = 1.0
    api_requests.BUSY_RETRY_PAUSES_S = (0.0,)
    pending_submissions.OWN_SUBMISSION_S = 0.0
    background_serve.read_key_names = lambda: KEYS


def perform(action: str, run_id: str, number: int) -> str:
    """Perform an action on a run; an error of ours is a result."""
    try:
        return str(ACTIONS[action](run_id, number) or "done")
    except LachesisError as error:
        return error.code


def _open_store() -> Any:
    from lachesis.runs.store import RunStore

    return RunStore()


def start(run_id: str, number: int) -> None:
    """Start a paid run, every second one as an agent."""
    from lachesis.config.launch_spec import LaunchSpec
    from lachesis.operations.launches import check_launch, start_run

    store, by_agent = _open_store(), bool(number % 2)
    if by_agent not in _launches:  # Importing the environment takes seconds.
        limits = {} if by_agent else {"limits.max_cost_usd": PER_RUN_USD}
        spec = LaunchSpec(
            environment="arithmetic",
            profile="tinker",
            confirmed=True,
            by_agent=by_agent,
            without_validation=not by_agent,
            settings=limits,
        )
        _launches[by_agent] = check_launch(store, spec)
    start_run(store, _launches[by_agent], run_id)


def stop(run_id: str, number: int) -> None:
    from lachesis.operations.runs import stop_run

    stop_run(_open_store(), run_id, by_agent=bool(number % 2))


def resume(run_id: str, number: int) -> None:
    from lachesis.operations.runs import resume_run

    store = _open_store()
    changes = {"limits.max_cost_usd": 1.0 + number} if number % 3 == 0 else None
    # The owner may give an agent's run more than the policy gives to agents, so each keeps to its
    # own runs.
    resume_run(store, run_id, changes, by_owner=not store.load(run_id).by_agent)


def remove(run_id: str, number: int) -> None:
    from lachesis.operations.runs import remove_runs

    remove_runs(_open_store(), [run_id])


def rename(run_id: str, number: int) -> None:
    from lachesis.operations.runs import edit_labels

    edit_labels(_open_store(), run_id, name=f"name-{number}")


def look(run_id: str, number: int) -> None:
    from lachesis.operations.run_lists import list_runs

    list_runs(_open_store())


def send(run_id: str, number: int) -> None:
    """Do what the runner of `lachesis serve` does every few seconds."""
    from lachesis.prefect_client.pending_submissions import send_all

    send_all(_open_store())


def tick(run_id: str, number: int) -> None:
    """Do what the monitor does every minute."""
    from lachesis.monitor.tick import Monitor

    Monitor(_open_store()).tick()


def begin(run_id: str, number: int) -> str | None:
    """Begin the attempt of a run as its flow does, if Prefect has its flow run."""
    from flows import attempts
    from lachesis.prefect_client.flow_run_keys import require_free_run
    from lachesis.prefect_client.resources import PrefectApi
    from lachesis.prefect_client.runs_from_prefect import find_or_create_run

    store, api = _open_store(), PrefectApi()
    flow_run_id = api.find_flow_run(store.load(run_id).submission_key)
    if flow_run_id is None or not _claim(api, flow_run_id):
        return "nothing to begin"
    record = find_or_create_run(store, {"run_id": run_id}, flow_run_id)
    require_free_run(store, record, flow_run_id)
    flow_run = SimpleNamespace(id=flow_run_id)
    attempts.runtime = SimpleNamespace(flow_run=flow_run)  # type: ignore[assignment]
    attempts.begin_attempt(store, run_id)
    api.set_state(flow_run_id, {"type": "RUNNING"}, force=True)
    return None


def _claim(api: Any, flow_run_id: str) -> bool:
    """Take a flow run as a runner does, which Prefect lets do one of several."""
    if api.read_flow_run(flow_run_id)["state"]["type"] != "SCHEDULED":
        return False
    body = {"state": {"type": "PENDING"}, "force": False}
    answer = api._request("POST", f"/flow_runs/{flow_run_id}/set_state", body)
    return bool(answer["status"] == "ACCEPT")


def end(run_id: str, number: int) -> str | None:
    """End the attempt of a run as its flow does: with all steps, or by an error."""
    from flows import attempts
    from lachesis.prefect_client.resources import PrefectApi
    from lachesis.runs.store import read_effective_config
    from lachesis.spending.budgets import read_spent_file

    store = _open_store()
    record = store.load(run_id)
    if record.status != "starting":
        return "nothing to end"
    # A run spends no more than its limit, and what it has spent never becomes less.
    limit = read_effective_config(store.dir(run_id)).limits.max_cost_usd
    spent_file = store.dir(run_id).spent
    spent = max(read_spent_file(spent_file).get("cost_usd", 0), round(limit / (1 + number), 3))
    spent_file.write_text(json.dumps({"cost_usd": spent}))
    error = None if number % 2 else KeyError("boom")
    ended = attempts.record_end(store, record, error)
    state = {"type": "FAILED" if ended.status == "failed" else "COMPLETED"}
    PrefectApi().set_state(str(record.flow_run_id), state, force=True)
    return None


ACTIONS = {
    action.__name__: action
    for action in (start, stop, resume, remove, rename, look, send, tick, begin, end)
}
