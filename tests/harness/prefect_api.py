"""Ask the Prefect server of a served home what tests have to know, by plain HTTP."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from lachesis.base.json_text import Json
from tests.harness.waiting import call_again, wait_until

ENDED = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")


class Server:
    """The Prefect server of a served home. SQLite takes one writer; who meets another is told 503
    and asks again.
    """

    def __init__(self, home: Path) -> None:
        note = json.loads((home / "server.json").read_text())
        self.url, self.pid = note["api_url"], note["processes"]["server"]["pid"]

    def send(self, method: str, path: str, body: Any = None) -> httpx.Response:
        """The answer, whatever its status."""

        def send() -> httpx.Response:
            answer = httpx.request(method, self.url + path, json=body, timeout=20, trust_env=False)
            if answer.status_code == 503:
                raise ConnectionError(path)
            return answer

        return call_again(send, ConnectionError, 30, poll_s=0.5)

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        answer = self.send(method, path, body).raise_for_status()
        return answer.json() if answer.content else None

    def deployment(self, flow: str) -> str:
        return str(self.ask("GET", f"/deployments/name/{flow}/{flow}")["id"])

    def start(
        self,
        flow: str,
        parameters: Json | None = None,
        *,
        enforce_parameter_schema: bool = True,
        **state: Any,
    ) -> str:
        """Start a flow run, now unless the state says another time, and return its id."""
        body = {
            "state": {"type": "SCHEDULED", **state},
            "parameters": parameters or {},
            "enforce_parameter_schema": enforce_parameter_schema,
        }
        path = f"/deployments/{self.deployment(flow)}/create_flow_run"
        return str(self.ask("POST", path, body)["id"])

    def state(self, flow_run: str) -> Json:
        return dict(self.ask("GET", f"/flow_runs/{flow_run}")["state"])

    def wait_for(self, condition: Callable[[], Any], timeout_s: float, what: str) -> Any:
        return wait_until(condition, timeout_s, what, poll_s=0.5)

    def ended(self, flow_run: str, timeout_s: float = 90) -> Json:
        """Its last state."""

        def final_state() -> Json | None:
            state = self.state(flow_run)
            return state if state["type"] in ENDED else None

        return dict(self.wait_for(final_state, timeout_s, f"the end of flow run {flow_run}"))

    def log_lines(self, flow_run: str) -> list[str]:
        """The lines of a flow run and its tasks, the oldest first."""
        body = {
            "logs": {"flow_run_id": {"any_": [flow_run]}},
            "sort": "TIMESTAMP_ASC",
            "limit": 200,
        }
        return [str(line["message"]) for line in self.ask("POST", "/logs/filter", body)]

    def tick(self) -> None:
        """One tick of the deployed monitor, in a process of the runner; another one as long as it
        met the schedule's own, whose place is given back some seconds after its end.
        """

        def last_state() -> Json | None:
            state = self.ended(self.start("monitor"))
            return state if state["type"] != "CANCELLED" else None

        state = self.wait_for(last_state, 90, "a tick that does not meet the schedule's own")
        assert state["type"] == "COMPLETED", state
