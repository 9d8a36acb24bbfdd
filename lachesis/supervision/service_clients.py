"""Ask the services of a run over HTTP."""

from __future__ import annotations

import contextlib
from typing import Any

import httpx

from lachesis.base.tls import get_tls_context
from lachesis.supervision.plan import ServicePlan


def fetch_trainer_health(plan: ServicePlan) -> dict[str, Any]:
    """Return what the trainer reports about itself; empty if it does not respond."""
    try:
        response = httpx.get(
            f"{plan.trainer_url}/health", timeout=3.0, trust_env=False, verify=get_tls_context()
        )
        content = response.json()
    except (httpx.HTTPError, ValueError):
        return {}
    if isinstance(content, dict):
        return content
    return {}


def count_registered_environments(plan: ServicePlan) -> int:
    """Return how many environments the API has registered, which is the next id; 0 if it does not
    respond.
    """
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
    """Tell the API that an environment is gone, so that its successor gets its whole share of the
    work.
    """
    with contextlib.suppress(httpx.HTTPError):
        url = f"{plan.config.env.rollout_server_url}/disconnect-env"
        httpx.post(
            url, json={"env_id": env_id}, timeout=3.0, trust_env=False, verify=get_tls_context()
        )
