"""Share one TLS context between all requests of a process.

Outside of a client, httpx creates a context for each request, also for plain `http://` URLs. That
takes 17 ms of processor time, more than the rest of a request, and services are asked ten times a
second while a run starts.
"""

from __future__ import annotations

import functools
import ssl

import httpx


@functools.cache
def get_tls_context() -> ssl.SSLContext:
    """Return the context that httpx would create, for its parameter `verify`."""
    return httpx.create_ssl_context(trust_env=False)
