"""Call a web address when a run fails, stalls, is stopped, or completes.

Notifications are automations of the Prefect server: they need no process of ours, and can be seen
and changed on its page "Automations". The body of a call is JSON with `event`, `run`, `message` and
`page`.
"""

import re
from urllib.parse import urlsplit

from lachesis.base.errors import ConfigError, shorten
from lachesis.base.json_text import Json
from lachesis.prefect_client.background_serve import TRAINING_FLOW
from lachesis.prefect_client.resources import PrefectApi

WEBHOOK_BLOCK_NAME = "lachesis-webhook"
AUTOMATION_TAG = "lachesis"
TRAINING_FLOW_FILTER = {"prefect.resource.role": "flow", "prefect.resource.name": TRAINING_FLOW}
_RUN_FIELDS = (
    '"run":{{flow_run.name|default("",true)|tojson}},'
    '"message":{{flow_run.state.message|default("",true)|tojson}}'
)
_STATE_BODY = (
    '{"event":{{flow_run.state.name|tojson}},'
    + _RUN_FIELDS
    + ',"page":{{flow_run|ui_url|string|tojson}}}'
)
_PAYLOAD_FIELDS = '"message":{{event.payload.message|tojson}},"page":{{event.payload.page|tojson}}}'
_EVENT_BODY = (
    '{"event":{{event.event|tojson}},"run":{{event.resource.name|tojson}},' + _PAYLOAD_FIELDS
)


def make_automation_templates() -> list[Json]:
    """Return the automations without their action."""
    return [
        _make_flow_run_template(
            "run failed", "A training run failed or crashed.", states=["Failed", "Crashed"]
        ),
        _make_flow_run_template(
            "run stopped",
            "A training run was stopped: by a user, a budget or a policy.",
            states=["Cancelled"],
        ),
        _make_flow_run_template("run finished", "A training run completed.", states=["Completed"]),
        _make_run_event_template(
            "run stalled", "A part of a run has stalled.", event="lachesis.run.stalled"
        ),
        _make_run_event_template(
            "run broken", "Learning is judged broken.", event="lachesis.run.broken"
        ),
    ]


def _make_flow_run_template(name: str, description: str, *, states: list[str]) -> Json:
    """Return an automation that is triggered when a flow run of a training enters a state."""
    trigger = {
        "expect": [f"prefect.flow-run.{state}" for state in states],
        "match": {"prefect.resource.id": "prefect.flow-run.*"},
        "match_related": TRAINING_FLOW_FILTER,
    }
    return _make_template(name, description, trigger, _STATE_BODY)


def _make_run_event_template(name: str, description: str, *, event: str) -> Json:
    """Return an automation that is triggered by an event that the monitor emits."""
    trigger = {
        "expect": [event],
        "match": {"prefect.resource.id": "lachesis.run.*"},
        "match_related": {},
    }
    return _make_template(name, description, trigger, _EVENT_BODY)


def _make_template(name: str, description: str, trigger: Json, payload: str) -> Json:
    """Return an automation with its trigger and the body of its call."""
    every_event = {
        "type": "event",
        "posture": "Reactive",
        "for_each": ["prefect.resource.id"],
        "threshold": 1,
        "within": 0,
    }
    return {
        "name": f"lachesis: {name}",
        "description": description,
        "enabled": True,
        "tags": [AUTOMATION_TAG],
        "trigger": {**every_event, **trigger},
        "payload": payload,
    }


def set_notifications(url: str) -> list[str]:
    """Let the automations call this URL, and return their names; existing ones are replaced.

    Raises:
        ConfigError: The text is not a URL.
        ServerDownError: The server does not respond.
    """
    if not _is_web_address(url):
        raise ConfigError(
            f"{shorten(url)!r} is not a web address; allowed: http://… or https://…, without "
            "spaces and braces"
        )
    names = []
    with PrefectApi().reuse_connection() as api:
        block_id = api.upsert_webhook_block(WEBHOOK_BLOCK_NAME, url)
        for template in make_automation_templates():
            payload = template.pop("payload")
            action = {"type": "call-webhook", "block_document_id": block_id, "payload": payload}
            api.upsert_automation({**template, "actions": [action]})
            names.append(template["name"])
    return names


def _is_web_address(url: str) -> bool:
    """Return whether a text is a web address and no template to the server."""
    try:
        parts = urlsplit(url)
        is_http_url = (
            parts.scheme in ("http", "https")
            and bool(parts.hostname)
            and (parts.port is None or parts.port > 0)
        )
    except ValueError:  # The port or the IPv6 address is invalid.
        return False
    # The server would interpret braces as a template.
    return is_http_url and re.search(r"[\s{}]", url) is None


def remove_notifications() -> list[str]:
    """Delete the automations, and return the names of those that existed.

    Raises:
        ServerDownError: The server does not respond.
    """
    with PrefectApi().reuse_connection() as api:
        return [
            template["name"]
            for template in make_automation_templates()
            if api.delete_automations(template["name"])
        ]
