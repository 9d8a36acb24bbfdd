"""Plan the proxy between an environment under test and the endpoint of a model."""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass
from pathlib import Path

from lachesis.base.keys import read_key
from lachesis.config.profiles import get_endpoint_key_name
from lachesis.runs.leftovers import MARK_VARIABLE, build_mark
from lachesis.supervision.health import make_http_readiness_check
from lachesis.supervision.ports import reserve_free_ports
from lachesis.supervision.process import ServiceSpec
from lachesis.supervision.service_env import HOST, PYTHON_MODULE_COMMAND

OPENROUTER_URL = "https://openrouter.ai/api/v1"


@dataclass(frozen=True)
class EndpointProxy:
    """Describe a proxy to start; see `lachesis.supervision.endpoint_proxy`."""

    service: ServiceSpec
    base_url: str
    """The URL that the environment samples from, including `/v1`."""
    client_env: dict[str, str]
    """Variables for the environment's process: a token that is valid for this proxy only."""


def make_endpoint_proxy(output: Path) -> EndpointProxy:
    """Plan a proxy to the endpoint in this process's variables, for one model of one test.

    Its log is beside `output`, the file of the model's groups.
    """
    url = (os.environ.get("OPENAI_BASE_URL") or OPENROUTER_URL).rstrip("/")
    token = secrets.token_urlsafe(24)
    (port,) = reserve_free_ports(1)
    address = f"http://{HOST}:{port}"
    service = ServiceSpec(
        "endpoint-proxy",
        [*PYTHON_MODULE_COMMAND, "lachesis.supervision.endpoint_proxy", "--port", str(port)],
        log=output.with_suffix(".proxy.log"),
        cwd=output.parent,
        env={
            "LACHESIS_ENDPOINT_URL": url,
            "LACHESIS_ENDPOINT_KEY": read_key(get_endpoint_key_name()),
            "LACHESIS_PROXY_TOKEN": token,
            MARK_VARIABLE: build_mark(output.parent),
        },
        port=port,
        check_ready=make_http_readiness_check(f"{address}/health"),
    )
    client_env = {
        "LACHESIS_INFERENCE_URL": address,
        "LACHESIS_INFERENCE_TOKEN": token,
        "ATROPOS_ALLOW_DUMMY_MANAGED_SERVER": "1",
        **_make_no_proxy_env(),
    }
    return EndpointProxy(service, f"{address}/v1", client_env)


def _make_no_proxy_env() -> dict[str, str]:
    """Return variables that keep requests to loopback from using the network's proxy."""
    excluded = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    value = ",".join(filter(None, (excluded, HOST, "localhost")))
    return {"NO_PROXY": value, "no_proxy": value}
