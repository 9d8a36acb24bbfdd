"""Notices: automations of the Prefect server that call a web address when a run fails, stalls, is stopped, or finishes.

They live in the server, fire without any process of ours, and can be seen and changed on its page "Automations". The call's
body is JSON with `event`, `run`, `message` and `page`."""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import urlsplit

from lachesis.base.errors import ConfigError, shorten
from lachesis.orchestration.launcher import FLOW
from lachesis.orchestration.prefect_api import PrefectApi

Json = dict[str, Any]
BLOCK = "lachesis-webhook"
TAG = "lachesis"
OF_TRAINING = {"prefect.resource.role": "flow", "prefect.resource.name": FLOW}
_RUN = '"run":{{flow_run.name|default("",true)|tojson}},"message":{{flow_run.state.message|default("",true)|tojson}}'
_STATE = '{"event":{{flow_run.state.name|tojson}},' + _RUN + ',"page":{{flow_run|ui_url|string|tojson}}}'
_PAYLOAD = '"message":{{event.payload.message|tojson}},"page":{{event.payload.page|tojson}}}'
_EVENT = '{"event":{{event.event|tojson}},"run":{{event.resource.name|tojson}},' + _PAYLOAD


def templates() -> list[Json]:
    """The automations, without their action."""

    def reactive(name: str, text: str, expect: list[str], match: str, related: Json, payload: str) -> Json:
        trigger = {
            "type": "event",
            "posture": "Reactive",
            "match": {"prefect.resource.id": match},
            "match_related": related,
            "for_each": ["prefect.resource.id"],
            "expect": expect,
            "threshold": 1,
            "within": 0,
        }
        return {
            "name": f"lachesis: {name}",
            "description": text,
            "enabled": True,
            "tags": [TAG],
            "trigger": trigger,
            "payload": payload,
        }

    flow_run, run = "prefect.flow-run.*", "lachesis.run.*"
    stopped = ["prefect.flow-run.Cancelled"]
    states = [f"prefect.flow-run.{state}" for state in ("Failed", "Crashed")]
    return [
        reactive("run failed", "A training run failed or crashed.", states, flow_run, OF_TRAINING, _STATE),
        reactive(
            "run stopped",
            "A training run was stopped: by somebody, a budget or a policy.",
            stopped,
            flow_run,
            OF_TRAINING,
            _STATE,
        ),
        reactive("run finished", "A training run completed.", ["prefect.flow-run.Completed"], flow_run, OF_TRAINING, _STATE),
        reactive("run stalled", "A part of a run stands still.", ["lachesis.run.stalled"], run, {}, _EVENT),
        reactive("run broken", "A run learns nothing.", ["lachesis.run.broken"], run, {}, _EVENT),
    ]


def set_notices(url: str) -> list[str]:
    """Make the automations call this address, whether they are there already or not; their names. Raises ConfigError, or
    ServerDownError."""
    if not _is_address(url):
        raise ConfigError(f"{shorten(url)!r} is no web address; allowed: http://… or https://…, without spaces and braces")
    names = []
    with PrefectApi().kept_alive() as api:
        block = api.webhook_block(BLOCK, url)
        for template in templates():
            payload = template.pop("payload")
            action = {"type": "call-webhook", "block_document_id": block, "payload": payload}
            api.put_automation({**template, "actions": [action]})
            names.append(template["name"])
    return names


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        known = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:  # a port or an IPv6 address that is none
        return False
    return known and re.search(r"[\s{}]", url) is None  # braces would be a template of the server


def remove_notices() -> list[str]:
    """Delete the automations; the names of those that were there. Raises ServerDownError."""
    with PrefectApi().kept_alive() as api:
        return [one["name"] for one in templates() if api.delete_automations(one["name"])]
