"""The few calls to a Prefect server that this project needs, by plain HTTP with a short time limit.

Prefect's own client is not used here: importing it takes two seconds, and during an outage of the server it blocks for
minutes, in which a flow could not look after its services.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

import httpx

from lachesis.base import paths
from lachesis.base.errors import ServerDownError
from lachesis.base.tls import get_tls_context

CONNECT_TIMEOUT_S = 1.0
"""A server that is down refuses at once; one that is busy accepts and is slow."""
READ_TIMEOUT_S = 2.5
"""For a question about runs, which can be answered from the records as well."""
TIMEOUT_S = 8.0
"""For all else; three of these stay below the 30 s that clients wait.
While several runs start on two cores, the server takes seconds to answer."""
BUSY_PAUSES_S = (0.1, 0.3, 0.9)
"""SQLite takes one writer; a server that meets another one answers 503."""
MOST_DELETED = 50
"""The server's own limit for one call."""
MISSING = object()
"""The answer to a question about something that the server does not know."""
Json = dict[str, Any]


def server_note(home: Path | None = None) -> Json | None:
    """What the launcher of this home has written: `api_url`, `ui_url`, `keys`, `max_runs`, `pids`; None when there is none, or
    nothing that could be one."""
    try:
        found = json.loads(server_file(home).read_text())
        ok = isinstance(found["api_url"], str) and isinstance(found["keys"], list) and isinstance(found["max_runs"], int)
        return found if ok and all(isinstance(key, str) for key in found["keys"]) else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def server_file(home: Path | None = None) -> Path:
    """Written by the launcher: where its Prefect server listens, its process ids, and which keys it holds."""
    return (home or paths.home()) / "server.json"


def api_url(home: Path | None = None) -> str | None:
    """`$PREFECT_API_URL`, else the address of the launcher that runs in this home; None when there is neither."""
    named = os.environ.get("PREFECT_API_URL")
    if named:
        return named.rstrip("/")
    note = server_note(home)
    return None if note is None else str(note["api_url"])


def auth_string() -> str | None:
    """NAME:PASSWORD of the server, from $PREFECT_API_AUTH_STRING or the setting of the server itself; None when it asks for
    none."""
    return os.environ.get("PREFECT_API_AUTH_STRING") or os.environ.get("PREFECT_SERVER_API_AUTH_STRING") or None


class PrefectApi:
    """One server. Every method raises ServerDownError when it does not answer in time."""

    def __init__(self, url: str | None = None) -> None:
        found = url or api_url()
        if found is None:
            raise ServerDownError(
                "no Prefect server is known: start one with `lachesis serve` and wait until it says `ready`, or set "
                "PREFECT_API_URL"
            )
        self.url = found
        user, _, password = (auth_string() or "").partition(":")
        self._auth = (user, password) if user else None
        self._client: httpx.Client | None = None

    @contextlib.contextmanager
    def kept_alive(self) -> Iterator[Self]:
        """One connection for many calls; a new one for each costs five times as much."""
        with httpx.Client(trust_env=False, verify=get_tls_context()) as self._client:
            try:
                yield self
            finally:
                self._client = None

    def require(self) -> None:
        """Raises ServerDownError unless the server answers."""
        self._ask("GET", "/health", timeout_s=READ_TIMEOUT_S)

    def healthy(self) -> bool:
        try:
            self.require()
        except ServerDownError:
            return False
        return True

    def deployment(self, flow: str, name: str) -> Json | None:
        """The deployment, or None when it is not registered."""
        found = self._ask("GET", f"/deployments/name/{flow}/{name}", missing_ok=True)
        return None if found is MISSING else found

    def create_run(self, deployment_id: str, *, name: str, parameters: Json, tags: list[str], key: str) -> Json:
        """Schedule a flow run for now; the same `key` gives the same run."""
        body = {
            "name": name,
            "parameters": parameters,
            "tags": tags,
            "idempotency_key": key,
            "state": {"type": "SCHEDULED", "message": "submitted"},
        }
        path = f"/deployments/{deployment_id}/create_flow_run"
        try:
            return self._ask("POST", path, body) or {}
        except ServerDownError:  # it may have been accepted all the same; the key makes asking again harmless
            return self._ask("POST", path, body) or {}

    def flow_run(self, flow_run_id: str) -> Json | None:
        found = self._ask("GET", f"/flow_runs/{flow_run_id}", missing_ok=True, timeout_s=READ_TIMEOUT_S)
        return None if found is MISSING else found

    def flow_runs(self, flow_run_ids: list[str]) -> dict[str, Json]:
        """Those that the server knows, by id."""
        found: dict[str, Json] = {}
        asked = [one for one in flow_run_ids if _is_uuid(one)]  # it refuses all of them for one that is none
        for start in range(0, len(asked), 200):  # the server's own limit for one answer
            body = {"flow_runs": {"id": {"any_": asked[start : start + 200]}}}
            for one in self._ask("POST", "/flow_runs/filter", body, timeout_s=READ_TIMEOUT_S) or []:
                found[one["id"]] = one
        return found

    def cancel(self, flow_run_id: str, message: str) -> Json:
        """Ask the runner to end the run; a run that has not started ends at once."""
        state = {"type": "CANCELLING", "name": "Cancelling", "message": message}
        return self._ask("POST", f"/flow_runs/{flow_run_id}/set_state", {"state": state, "force": False}) or {}

    def suspend(self, flow_run_id: str, message: str) -> None:
        """Write that the flow run is suspended, without a time limit, whatever its state is."""
        details = {"pause_reschedule": True}
        state = {"type": "PAUSED", "name": "Suspended", "message": message, "state_details": details}
        body = {"state": state, "force": True}
        self._ask("POST", f"/flow_runs/{flow_run_id}/set_state", body)

    def resume(self, flow_run_id: str) -> bool:
        """Schedule a suspended flow run again; False when it is not suspended any more."""
        answer = self._ask("POST", f"/flow_runs/{flow_run_id}/resume")
        return (answer or {}).get("status") == "ACCEPT"

    def show(
        self, flow_run_id: str | None, *, key: str, kind: str, data: Any, description: str, known: str | None = None
    ) -> str:
        """Change the artifact in place, `known` or the newest of that key and flow run, or make it. Its id."""
        shown = json.dumps(data) if kind == "table" else data
        known = known or self._newest(key, flow_run_id)
        if known is not None and self.update_artifact(known, shown):
            return known
        return self.create_artifact(flow_run_id, key=key, kind=kind, data=shown, description=description)

    def _newest(self, key: str, flow_run_id: str | None) -> str | None:
        """By a filter: the route for the latest of a key answers with the id of the key's history, which cannot be changed."""
        wanted: Json = {"key": {"any_": [key]}}
        if flow_run_id is not None:
            wanted["flow_run_id"] = {"any_": [flow_run_id]}
        found = self._ask("POST", "/artifacts/filter", {"artifacts": wanted, "sort": "CREATED_DESC", "limit": 1})
        return str(found[0]["id"]) if found else None

    def create_artifact(self, flow_run_id: str | None, *, key: str, kind: str, data: Any, description: str = "") -> str:
        """Its id. `data` of a table is a list of rows, of progress a number from 0 to 100. Without a flow run it stands
        alone."""
        body = {"key": key, "type": kind, "data": data, "description": description, "flow_run_id": flow_run_id}
        return str((self._ask("POST", "/artifacts/", body) or {}).get("id"))

    def update_artifact(self, artifact_id: str, data: Any) -> bool:
        """Change it in place, which keeps the database as large as it is. False when the server does not know it (any more)."""
        return self._ask("PATCH", f"/artifacts/{artifact_id}", {"data": data}, missing_ok=True) is not MISSING

    def emit(self, event: str, resource: Json, *, related: list[Json], payload: Json) -> None:
        """Tell the server that something happened, which automations can wait for."""
        body = {
            "id": str(uuid.uuid4()),
            "occurred": datetime.now(UTC).isoformat(),
            "event": event,
            "resource": resource,
            "related": related,
            "payload": payload,
        }
        self._ask("POST", "/events", [body])

    def webhook_block(self, name: str, url: str) -> str:
        """The id of the block document of that name, which calls this address by POST with JSON."""
        found = self._ask("GET", f"/block_types/slug/webhook/block_documents/name/{name}", missing_ok=True)
        data = {"url": url, "method": "POST", "headers": {"Content-Type": "application/json"}}
        if found is not MISSING:
            self._ask("PATCH", f"/block_documents/{found['id']}", {"data": data, "merge_existing_data": True})
            return str(found["id"])
        kind = self._ask("GET", "/block_types/slug/webhook")["id"]
        wanted = {"block_schemas": {"block_type_id": {"any_": [kind]}}, "limit": 1}
        schema = self._ask("POST", "/block_schemas/filter", wanted)[0]["id"]
        body = {"name": name, "block_type_id": kind, "block_schema_id": schema, "data": data}
        return str(self._ask("POST", "/block_documents/", body)["id"])

    def put_automation(self, automation: Json) -> None:
        """Make the automation, or replace the one of that name; names are not unique in the server."""
        known = self._automations(automation["name"])
        if known:
            self._ask("PUT", f"/automations/{known[0]}", automation)
        else:
            self._ask("POST", "/automations/", automation)

    def delete_automations(self, name: str) -> int:
        """How many there were of that name."""
        known = self._automations(name)
        for one in known:
            self._ask("DELETE", f"/automations/{one}")
        return len(known)

    def _automations(self, name: str) -> list[str]:
        found = self._ask("POST", "/automations/filter", {"automations": {"name": {"any_": [name]}}})
        return [str(one["id"]) for one in found or []]

    def delete_runs(self, deployment_id: str, *, before: str) -> int:
        """Delete the ended flow runs of a deployment that ended before that time, at most fifty; how many there were."""
        ended = {"type": {"any_": ["COMPLETED", "CANCELLED", "FAILED", "CRASHED"]}}
        wanted = {"deployment_id": {"any_": [deployment_id]}, "state": ended, "end_time": {"before_": before}}
        answer = self._ask("POST", "/flow_runs/bulk_delete", {"flow_runs": wanted, "limit": MOST_DELETED})
        return len((answer or {}).get("deleted", []))

    def _ask(
        self, method: str, path: str, body: Any = None, *, missing_ok: bool = False, timeout_s: float | None = None
    ) -> Any:
        limit = httpx.Timeout(timeout_s or TIMEOUT_S, connect=CONNECT_TIMEOUT_S)
        try:
            for pause in (*BUSY_PAUSES_S, 0.0):
                answer = self._send(method, path, body, limit)
                if answer.status_code != 503 or not pause:
                    break
                time.sleep(pause)
        except httpx.ReadTimeout as error:
            raise ServerDownError(
                f"the Prefect server at {self.url} accepts calls and has not answered in {timeout_s or TIMEOUT_S:g} s; it is "
                "busy, or hangs: try again, or start it anew with `lachesis serve`"
            ) from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ServerDownError(
                f"the Prefect server at {self.url} does not answer ({type(error).__name__}); start it with `lachesis serve`"
            ) from error
        if answer.status_code == 404 and missing_ok:
            return MISSING
        if answer.status_code == 401:
            raise ServerDownError(
                f"the Prefect server at {self.url} asks for a name and a password: set PREFECT_API_AUTH_STRING to "
                "NAME:PASSWORD, as it was given to `lachesis serve`"
            )
        if answer.status_code >= 400:
            raise ServerDownError(f"the Prefect server answered {path} with HTTP {answer.status_code}: {answer.text[:500]}")
        try:
            return answer.json() if answer.content else None
        except ValueError as error:
            raise ServerDownError(f"what answers at {self.url} is no Prefect server: {answer.text[:100]!r}") from error

    def _send(self, method: str, path: str, body: Any, limit: httpx.Timeout) -> httpx.Response:
        options: Json = {"json": body, "timeout": limit, "auth": self._auth, "follow_redirects": True}
        if self._client is not None:
            return self._client.request(method, self.url + path, **options)
        return httpx.request(method, self.url + path, trust_env=False, verify=get_tls_context(), **options)


def _is_uuid(text: str) -> bool:
    try:
        uuid.UUID(text)
    except ValueError:
        return False
    return True
