"""One TLS context for all requests of a process.

httpx makes one for each request outside of a client, also for a plain `http://` address. That takes
17 ms of processor time, more than all the rest of a request, and services are asked ten times a
second while a run starts.
"""

from __future__ import annotations

import functools
import ssl

import httpx


@functools.cache
def get_tls_context() -> ssl.SSLContext:
    """Return the context that httpx would make, for its parameter `verify`."""
    return httpx.create_ssl_context(trust_env=False)
