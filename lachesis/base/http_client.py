"""Ask our own HTTP services, which listen on loopback: without a proxy, with one TLS context.

A variable such as `HTTP_PROXY` would send the requests for our services to the user's proxy, which
cannot reach them, so our clients ignore those variables. For the clients of libraries, such as
Prefect's and Tinker's, `lachesis/__init__.py` names loopback in `NO_PROXY`.

Outside of a client, httpx creates a TLS context for each request, also for plain `http://` URLs.
That takes 17 ms of processor time, more than the rest of a request, and services are asked ten
times a second while a run starts.
"""

import functools
import ssl
from typing import Any

import httpx

# How long a service may take to answer whether it is ready.
TIMEOUT_S = 3.0


@functools.cache
def get_tls_context() -> ssl.SSLContext:
    """Return the context that httpx would create, for its parameter `verify`."""
    return httpx.create_ssl_context(trust_env=False)


def request_service(
    method: str, url: str, *, timeout: httpx.Timeout | float = TIMEOUT_S, **options: Any
) -> httpx.Response:
    """Send one request to a service of ours and return its response.

    Args:
        method: The HTTP method.
        url: The whole address.
        timeout: Seconds, or the limits of connecting and reading.
        options: Further ones of `httpx.request`, such as `json` and `headers`.

    Raises:
        httpx.HTTPError: The service does not respond.
    """
    return httpx.request(
        method, url, timeout=timeout, trust_env=False, verify=get_tls_context(), **options
    )


def open_service_client(**options: Any) -> httpx.Client:
    """Return a client of a service of ours, which keeps its connection; close it after use."""
    return httpx.Client(trust_env=False, verify=get_tls_context(), **options)


def open_async_service_client(**options: Any) -> httpx.AsyncClient:
    """Return an asynchronous client of a service of ours; close it after use."""
    return httpx.AsyncClient(trust_env=False, verify=get_tls_context(), **options)
