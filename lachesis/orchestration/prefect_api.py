"""Call a Prefect server by plain HTTP with short time limits.

Prefect's own client is not used: importing it takes two seconds, and during an outage of the server
it blocks for minutes, in which a flow could not watch its services.
"""

from __future__ import annotations

import contextlib
import json
import time
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any, Self

import httpx

from lachesis.base.errors import ServerDownError
from lachesis.base.json_text import Json
from lachesis.base.tls import get_tls_context
from lachesis.orchestration.server_info import find_api_url, read_auth_string

# A server that is down refuses a connection at once; one that is busy accepts it and is slow.
CONNECT_TIMEOUT_S = 1.0
# Time limit for questions about runs, which the records can answer too.
READ_TIMEOUT_S = 2.5
# Time limit for other calls; three of them stay below the 30 s that clients wait.
#
# While several runs start on two cores, the server takes seconds to respond.
TIMEOUT_S = 8.0
# Pauses before a busy server is called again; SQLite allows one writer, else it responds with 503.
BUSY_RETRY_PAUSES_S = (0.1, 0.3, 0.9)
# The server's own limit for one call.
MAX_DELETED_RUNS = 50
# Returned for an object that the server does not know.
MISSING = object()


class PrefectApi:
    """Call one server; every method raises ServerDownError if it does not respond in time."""

    def __init__(self, url: str | None = None) -> None:
        server_url = url or find_api_url()
        if server_url is None:
            raise ServerDownError(
                "no Prefect server is known: start one with `lachesis serve` and wait until it "
                "prints `ready`, or set PREFECT_API_URL"
            )
        self.url = server_url
        user, _, password = (read_auth_string() or "").partition(":")
        self._auth = (user, password) if user else None
        self._client: httpx.Client | None = None

    @contextlib.contextmanager
    def reuse_connection(self) -> Iterator[Self]:
        """Use one connection for many calls; a new one for each takes five times as long."""
        with httpx.Client(trust_env=False, verify=get_tls_context()) as self._client:
            try:
                yield self
            finally:
                self._client = None

    def require_healthy(self) -> None:
        """Raise ServerDownError unless the server responds."""
        self._request("GET", "/health", timeout_s=READ_TIMEOUT_S)

    def is_healthy(self) -> bool:
        """Return whether the server responds."""
        try:
            self.require_healthy()
        except ServerDownError:
            return False
        return True

    def read_deployment(self, flow: str, name: str) -> Json | None:
        """Return the deployment, or None if it is not registered."""
        deployment = self._request("GET", f"/deployments/name/{flow}/{name}", missing_ok=True)
        return _none_if_missing(deployment)

    def create_flow_run(
        self, deployment_id: str, *, name: str, parameters: Json, tags: list[str], key: str
    ) -> Json:
        """Schedule a flow run for now; the same `key` returns the same run."""
        body = {
            "name": name,
            "parameters": parameters,
            "tags": tags,
            "idempotency_key": key,
            "state": {"type": "SCHEDULED", "message": "submitted"},
        }
        path = f"/deployments/{deployment_id}/create_flow_run"
        try:
            return self._request("POST", path, body) or {}
        except ServerDownError:
            # The call may have succeeded; because of the key it can be repeated safely.
            return self._request("POST", path, body) or {}

    def read_flow_run(self, flow_run_id: str) -> Json | None:
        """Return a flow run, or None if the server does not know it."""
        flow_run = self._request(
            "GET", f"/flow_runs/{flow_run_id}", missing_ok=True, timeout_s=READ_TIMEOUT_S
        )
        return _none_if_missing(flow_run)

    def read_flow_runs(self, flow_run_ids: list[str]) -> dict[str, Json]:
        """Return the flow runs that the server knows, by id."""
        flow_runs: dict[str, Json] = {}
        # One invalid id would make the server refuse the whole call.
        valid_ids = [flow_run_id for flow_run_id in flow_run_ids if _is_uuid(flow_run_id)]
        for start in range(0, len(valid_ids), 200):  # This is the server's own limit.
            body = {"flow_runs": {"id": {"any_": valid_ids[start : start + 200]}}}
            for flow_run in (
                self._request("POST", "/flow_runs/filter", body, timeout_s=READ_TIMEOUT_S) or []
            ):
                flow_runs[flow_run["id"]] = flow_run
        return flow_runs

    def cancel(self, flow_run_id: str, message: str) -> Json:
        """Ask the runner to end the run; a run that has not started ends at once."""
        state = {"type": "CANCELLING", "name": "Cancelling", "message": message}
        return (
            self._request(
                "POST", f"/flow_runs/{flow_run_id}/set_state", {"state": state, "force": False}
            )
            or {}
        )

    def suspend(self, flow_run_id: str, message: str) -> None:
        """Mark the flow run as suspended without a time limit, whatever its state is."""
        details = {"pause_reschedule": True}
        state = {
            "type": "PAUSED",
            "name": "Suspended",
            "message": message,
            "state_details": details,
        }
        body = {"state": state, "force": True}
        self._request("POST", f"/flow_runs/{flow_run_id}/set_state", body)

    def resume(self, flow_run_id: str) -> bool:
        """Schedule a suspended flow run again; return False if it is no longer suspended."""
        result = self._request("POST", f"/flow_runs/{flow_run_id}/resume")
        return (result or {}).get("status") == "ACCEPT"

    def upsert_artifact(
        self,
        flow_run_id: str | None,
        *,
        key: str,
        kind: str,
        data: object,
        description: str,
        artifact_id: str | None = None,
    ) -> str:
        """Change an artifact in place, or create it, and return its id.

        The artifact is `artifact_id`, or the newest of that key and flow run.
        """
        encoded_data = json.dumps(data) if kind == "table" else data
        artifact_id = artifact_id or self._find_newest_artifact(key, flow_run_id)
        if artifact_id is not None and self.update_artifact(artifact_id, encoded_data):
            return artifact_id
        return self.create_artifact(
            flow_run_id, key=key, kind=kind, data=encoded_data, description=description
        )

    def _find_newest_artifact(self, key: str, flow_run_id: str | None) -> str | None:
        """Return the id of the newest artifact by a filter.

        The route for the latest of a key returns the id of the key's history, which cannot be
        changed.
        """
        artifact_filter: Json = {"key": {"any_": [key]}}
        if flow_run_id is not None:
            artifact_filter["flow_run_id"] = {"any_": [flow_run_id]}
        artifacts = self._request(
            "POST",
            "/artifacts/filter",
            {"artifacts": artifact_filter, "sort": "CREATED_DESC", "limit": 1},
        )
        if artifacts:
            return str(artifacts[0]["id"])
        return None

    def create_artifact(
        self, flow_run_id: str | None, *, key: str, kind: str, data: object, description: str = ""
    ) -> str:
        """Create an artifact and return its id.

        `data` of a table is a list of rows, of progress a number from 0 to 100. The artifact may
        have no flow run.
        """
        body = {
            "key": key,
            "type": kind,
            "data": data,
            "description": description,
            "flow_run_id": flow_run_id,
        }
        return str((self._request("POST", "/artifacts/", body) or {}).get("id"))

    def update_artifact(self, artifact_id: str, data: object) -> bool:
        """Change an artifact in place, which does not enlarge the database; return False if it is
        unknown.
        """
        return (
            self._request("PATCH", f"/artifacts/{artifact_id}", {"data": data}, missing_ok=True)
            is not MISSING
        )

    def emit_event(self, event: str, resource: Json, *, related: list[Json], payload: Json) -> None:
        """Send an event, which automations can react to."""
        body = {
            "id": str(uuid.uuid4()),
            "occurred": datetime.now(UTC).isoformat(),
            "event": event,
            "resource": resource,
            "related": related,
            "payload": payload,
        }
        self._request("POST", "/events", [body])

    def upsert_webhook_block(self, name: str, url: str) -> str:
        """Create or change the webhook block of this name, and return its id; it posts JSON to the
        URL.
        """
        block_document = self._request(
            "GET", f"/block_types/slug/webhook/block_documents/name/{name}", missing_ok=True
        )
        data = {"url": url, "method": "POST", "headers": {"Content-Type": "application/json"}}
        if block_document is not MISSING:
            self._request(
                "PATCH",
                f"/block_documents/{block_document['id']}",
                {"data": data, "merge_existing_data": True},
            )
            return str(block_document["id"])
        block_type_id = self._request("GET", "/block_types/slug/webhook")["id"]
        schema_filter = {"block_schemas": {"block_type_id": {"any_": [block_type_id]}}, "limit": 1}
        schema = self._request("POST", "/block_schemas/filter", schema_filter)[0]["id"]
        body = {
            "name": name,
            "block_type_id": block_type_id,
            "block_schema_id": schema,
            "data": data,
        }
        return str(self._request("POST", "/block_documents/", body)["id"])

    def upsert_automation(self, automation: Json) -> None:
        """Create the automation, or replace the one of the same name; the server allows equal
        names.
        """
        automation_ids = self._find_automation_ids(automation["name"])
        if automation_ids:
            self._request("PUT", f"/automations/{automation_ids[0]}", automation)
        else:
            self._request("POST", "/automations/", automation)

    def delete_automations(self, name: str) -> int:
        """Delete the automations of this name, and return how many there were."""
        automation_ids = self._find_automation_ids(name)
        for automation_id in automation_ids:
            self._request("DELETE", f"/automations/{automation_id}")
        return len(automation_ids)

    def _find_automation_ids(self, name: str) -> list[str]:
        automations = self._request(
            "POST", "/automations/filter", {"automations": {"name": {"any_": [name]}}}
        )
        return [str(automation["id"]) for automation in automations or []]

    def delete_flow_runs(self, deployment_id: str, *, before: str) -> int:
        """Delete up to fifty flow runs of a deployment that ended before a time; return how
        many.
        """
        ended = {"type": {"any_": ["COMPLETED", "CANCELLED", "FAILED", "CRASHED"]}}
        flow_run_filter = {
            "deployment_id": {"any_": [deployment_id]},
            "state": ended,
            "end_time": {"before_": before},
        }
        result = self._request(
            "POST",
            "/flow_runs/bulk_delete",
            {"flow_runs": flow_run_filter, "limit": MAX_DELETED_RUNS},
        )
        return len((result or {}).get("deleted", []))

    def _request(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        missing_ok: bool = False,
        timeout_s: float | None = None,
    ) -> Any:
        response = self._request_when_ready(method, path, body, timeout_s or TIMEOUT_S)
        if response.status_code == 404 and missing_ok:
            return MISSING
        if response.status_code == 401:
            raise ServerDownError(
                f"the Prefect server at {self.url} requires a name and a password: set "
                "PREFECT_API_AUTH_STRING to the NAME:PASSWORD that was given to `lachesis serve`"
            )
        if response.status_code >= 400:
            raise ServerDownError(
                f"the Prefect server responded to {path} with HTTP {response.status_code}: "
                f"{response.text[:500]}"
            )
        if not response.content:
            return None
        try:
            return response.json()
        except ValueError as error:
            raise ServerDownError(
                f"the server at {self.url} is not a Prefect server: {response.text[:100]!r}"
            ) from error

    def _request_when_ready(
        self, method: str, path: str, body: object, timeout_s: float
    ) -> httpx.Response:
        """Return the server's response; repeat the request while the server is too busy for it."""
        timeout = httpx.Timeout(timeout_s, connect=CONNECT_TIMEOUT_S)
        try:
            for pause_s in BUSY_RETRY_PAUSES_S:
                response = self._send_request(method, path, body, timeout)
                # The server responds with 503 while its database is locked.
                if response.status_code != 503:
                    return response
                time.sleep(pause_s)
            return self._send_request(method, path, body, timeout)
        except httpx.ReadTimeout as error:
            raise ServerDownError(
                f"the Prefect server at {self.url} accepts calls but has not responded within "
                f"{timeout_s:g} s; it is busy or hangs: try again, or restart it with "
                "`lachesis serve`"
            ) from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ServerDownError(
                f"the Prefect server at {self.url} does not respond ({type(error).__name__}); "
                f"start it with `lachesis serve`"
            ) from error

    def _send_request(
        self, method: str, path: str, body: object, timeout: httpx.Timeout
    ) -> httpx.Response:
        options: Json = {
            "json": body,
            "timeout": timeout,
            "auth": self._auth,
            "follow_redirects": True,
        }
        if self._client is not None:
            return self._client.request(method, self.url + path, **options)
        return httpx.request(
            method, self.url + path, trust_env=False, verify=get_tls_context(), **options
        )


def _is_uuid(text: str) -> bool:
    try:
        uuid.UUID(text)
    except ValueError:
        return False
    return True


def _none_if_missing(answer: Any) -> Json | None:
    if answer is MISSING:
        return None
    return dict(answer)
