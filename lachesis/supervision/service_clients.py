"""Ask the services of a run over HTTP."""

from __future__ import annotations

import contextlib
from typing import Any

import httpx

from lachesis.base.tls import get_tls_context
from lachesis.supervision.plan import ServicePlan


def fetch_trainer_health(plan: ServicePlan) -> dict[str, Any]:
    """What the trainer says about itself; empty when it does not answer."""
    try:
        response = httpx.get(
            f"{plan.trainer_url}/health", timeout=3.0, trust_env=False, verify=get_tls_context()
        )
        content = response.json()
    except (httpx.HTTPError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def count_registered_environments(plan: ServicePlan) -> int:
    """How many environments the API has met; the number of the next one. 0 when it does not answer."""
    try:
        response = httpx.get(
            f"{plan.config.env.rollout_server_url}/counts",
            timeout=3.0,
            trust_env=False,
            verify=get_tls_context(),
        )
        return int(response.json()["registered"])
    except (httpx.HTTPError, ValueError, KeyError, TypeError):
        return 0


def disconnect_environment(plan: ServicePlan, env_id: int) -> None:
    """Tell the API that this environment is gone; else the next one would get a share of the work
    only.
    """
    with contextlib.suppress(httpx.HTTPError):
        url = f"{plan.config.env.rollout_server_url}/disconnect-env"
        httpx.post(
            url, json={"env_id": env_id}, timeout=3.0, trust_env=False, verify=get_tls_context()
        )
