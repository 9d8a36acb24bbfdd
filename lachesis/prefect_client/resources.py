"""Ask a Prefect server about deployments, flow runs, artifacts, events and automations."""

import json
import uuid
from datetime import UTC, datetime
from typing import Any

from lachesis.base.errors import ServerDownError
from lachesis.base.json_text import Json
from lachesis.prefect_client.api_requests import MISSING, PrefectHttp, was_never_sent, was_refused

# Time limit for questions about runs, which the records can answer too.
READ_TIMEOUT_S = 2.5
# The server's own limit for one call.
MAX_DELETED_RUNS = 50


class PrefectApi(PrefectHttp):
    """Call one server; every method raises ServerDownError if it does not respond in time."""

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

    def update_deployment(self, deployment_id: str, changes: Json) -> None:
        """Change fields of a deployment; its schedules and flow runs stay as they are."""
        self._request("PATCH", f"/deployments/{deployment_id}", changes)

    def list_waiting_flow_runs(self, deployment_id: str, *, due_only: bool = False) -> list[Json]:
        """Return the flow runs of a deployment that wait to be started or are suspended.

        With `due_only` return only those whose time has come and that are not suspended.
        """
        flow_run_filter: Json = {
            "deployment_id": {"any_": [deployment_id]},
            "state": {"type": {"any_": ["SCHEDULED"] if due_only else ["SCHEDULED", "PAUSED"]}},
        }
        if due_only:
            flow_run_filter["next_scheduled_start_time"] = {
                "before_": datetime.now(UTC).isoformat()
            }
        body = {"flow_runs": flow_run_filter, "sort": "EXPECTED_START_TIME_ASC"}
        return list(self._request("POST", "/flow_runs/filter", body) or [])

    def count_flow_runs(
        self, deployment_id: str, states: list[str], *, due_before: str | None = None
    ) -> int:
        """Return how many flow runs of a deployment are in these states and due by a time."""
        flow_run_filter: Json = {
            "deployment_id": {"any_": [deployment_id]},
            "state": {"type": {"any_": states}},
        }
        if due_before is not None:
            flow_run_filter["next_scheduled_start_time"] = {"before_": due_before}
        body = {"flow_runs": flow_run_filter}
        return int(self._request("POST", "/flow_runs/count", body, timeout_s=READ_TIMEOUT_S))

    def create_flow_run(
        self, deployment_id: str, *, name: str, parameters: Json, tags: list[str], key: str
    ) -> Json:
        """Schedule a flow run for now; the same `key` returns the same run.

        Raises:
            ServerDownError: There is no such flow run if `was_refused` or `was_never_sent` is true
                of the error; else there may be one.
        """
        body = {
            "name": name,
            "parameters": parameters,
            "tags": tags,
            "idempotency_key": key,
            "state": {"type": "SCHEDULED", "message": "submitted"},
            # They were checked here, and may name an environment by its file.
            "enforce_parameter_schema": False,
        }
        path = f"/deployments/{deployment_id}/create_flow_run"
        try:
            return self._request("POST", path, body) or {}
        except ServerDownError as error:
            if was_refused(error) or was_never_sent(error):
                raise
        try:
            # The call may have succeeded; because of the key it can be repeated safely.
            return self._request("POST", path, body) or {}
        except ServerDownError as error:
            if was_refused(error):
                raise
            raise ServerDownError(str(error)) from None

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

    def find_flow_run(self, key: str) -> str | None:
        """Return the id of the flow run that was scheduled with a key, or None."""
        body = {"flow_runs": {"idempotency_key": {"any_": [key]}}}
        flow_runs = self._request("POST", "/flow_runs/filter", body, timeout_s=READ_TIMEOUT_S)
        return str(flow_runs[0]["id"]) if flow_runs else None

    def update_flow_run(self, flow_run_id: str, *, name: str, tags: list[str]) -> None:
        """Give a flow run another name and other tags."""
        self._request("PATCH", f"/flow_runs/{flow_run_id}", {"name": name, "tags": tags})

    def set_state(self, flow_run_id: str, state: Json, *, force: bool = False) -> Json:
        """Propose a state, which is set if the server's rules allow it or with `force`; return the
        state that the flow run has now.
        """
        path = f"/flow_runs/{flow_run_id}/set_state"
        result = self._request("POST", path, {"state": state, "force": force}) or {}
        if result.get("state"):
            return dict(result["state"])
        return dict((self.read_flow_run(flow_run_id) or {}).get("state") or state)

    def cancel(self, flow_run_id: str, message: str) -> Json:
        """Ask the runner to end the run; a run that has not started ends at once."""
        state = {"type": "CANCELLING", "name": "Cancelling", "message": message}
        return (
            self._request(
                "POST", f"/flow_runs/{flow_run_id}/set_state", {"state": state, "force": False}
            )
            or {}
        )

    def upsert_artifact(
        self,
        flow_run_id: str | None,
        *,
        key: str,
        kind: str,
        data: object,
        description: str,
        artifact_id: str | None = None,
        task_run_id: str | None = None,
    ) -> str:
        """Change an artifact in place, or create it, and return its id.

        The artifact is `artifact_id`, or the newest of that key, kind and flow run.
        """
        encoded_data = json.dumps(data) if kind == "table" else data
        artifact_id = artifact_id or self.find_artifact(key, kind, flow_run_id)
        if artifact_id is not None and self.update_artifact(artifact_id, encoded_data):
            return artifact_id
        return self.create_artifact(
            flow_run_id,
            key=key,
            kind=kind,
            data=encoded_data,
            description=description,
            task_run_id=task_run_id,
        )

    def find_artifact(self, key: str, kind: str, flow_run_id: str | None = None) -> str | None:
        """Return the id of the newest artifact of a key and kind, or None if there is none.

        The route for the latest of a key returns the id of the key's history, which cannot be
        changed.
        """
        artifact_filter: Json = {"key": {"any_": [key]}, "type": {"any_": [kind]}}
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
        self,
        flow_run_id: str | None,
        *,
        key: str,
        kind: str,
        data: object,
        description: str = "",
        task_run_id: str | None = None,
    ) -> str:
        """Create an artifact, of a flow run, of one of its tasks, or of neither; return its id.

        `data` of a table is a list of rows, of progress a number from 0 to 100.
        """
        body = {
            "key": key,
            "type": kind,
            "data": data,
            "description": description,
            "flow_run_id": flow_run_id,
            "task_run_id": task_run_id,
        }
        return str((self._request("POST", "/artifacts/", body) or {}).get("id"))

    def update_artifact(self, artifact_id: str, data: object) -> bool:
        """Change an artifact in place, which adds no row; return False if it is unknown."""
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
        """Create or change the webhook block that posts JSON to a URL, and return its id."""
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
        """Create the automation, or replace its namesake; the server allows equal names."""
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
        """Delete up to fifty ended flow runs that are older than a time; return how many."""
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
