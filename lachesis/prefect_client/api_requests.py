"""Call a Prefect server by plain HTTP with short time limits.

Prefect's own client is not used: importing it takes two seconds, and during an outage of the server
it blocks for minutes, in which a flow could not watch its services.
"""

import contextlib
import time
from collections.abc import Iterator
from typing import Any, Self

import httpx

from lachesis.base.errors import ServerDownError
from lachesis.base.http_client import open_service_client, request_service
from lachesis.base.json_text import Json
from lachesis.prefect_client.serve_info import (
    HOME_HEADER,
    find_api_url,
    find_expected_proof,
    is_serve_alive,
    read_auth_string,
)

# A server that is down refuses a connection at once; one that is busy accepts it and is slow.
CONNECT_TIMEOUT_S = 1.0
# Time limit for other calls; three of them stay below the 30 s that clients wait.
#
# While several runs start on two cores, the server takes seconds to respond.
TIMEOUT_S = 8.0
# Pauses before a busy server is called again; SQLite allows one writer, else it responds with 503.
BUSY_RETRY_PAUSES_S = (0.1, 0.3, 0.9)
# Returned for an object that the server does not know.
MISSING = object()


def was_refused(error: ServerDownError) -> bool:
    """Return whether the server has read the request and refused it, and will do so again."""
    status = error.details.get("status")
    return isinstance(status, int) and 400 <= status < 500


def was_never_sent(error: ServerDownError) -> bool:
    """Return whether no server has received the request, because none was connected to."""
    return isinstance(error.__cause__, httpx.ConnectError | httpx.ConnectTimeout | httpx.InvalidURL)


class PrefectHttp:
    """Send requests to one server, and repeat those that meet a busy database."""

    def __init__(self, url: str | None = None) -> None:
        server_url = url or find_api_url()
        if server_url is None:
            raise ServerDownError(
                "no Prefect server is known: start one with `lachesis serve` and wait until it "
                "prints `ready`, or set PREFECT_API_URL"
            )
        self.url = server_url
        self._expected_proof = find_expected_proof(server_url)
        user, _, password = (read_auth_string() or "").partition(":")
        self._auth = (user, password) if user else None
        self._client: httpx.Client | None = None

    @contextlib.contextmanager
    def reuse_connection(self) -> Iterator[Self]:
        """Use one connection for many calls; a new one for each takes five times as long."""
        with open_service_client() as self._client:
            try:
                yield self
            finally:
                self._client = None

    def _request(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        missing_ok: bool = False,
        timeout_s: float | None = None,
    ) -> Any:
        """Return the JSON of an answer; raise ServerDownError for a refusal or none in time."""
        response = self._request_when_ready(method, path, body, timeout_s or TIMEOUT_S)
        self._require_own_server(response)
        if response.status_code == 404 and missing_ok:
            return MISSING
        if response.status_code == 401:
            raise ServerDownError(
                f"the Prefect server at {self.url} requires a name and a password: set "
                "PREFECT_API_AUTH_STRING to the NAME:PASSWORD that was given to `lachesis serve`",
                status=response.status_code,
            )
        if response.status_code >= 400:
            raise ServerDownError(
                f"the Prefect server responded to {path} with HTTP {response.status_code}: "
                f"{response.text[:500]}",
                status=response.status_code,
            )
        if not response.content:
            return None
        try:
            return response.json()
        except ValueError as error:
            raise ServerDownError(
                f"the server at {self.url} is not a Prefect server: {response.text[:100]!r}"
            ) from error

    def _require_own_server(self, response: httpx.Response) -> None:
        """Raise ServerDownError if another home's server listens where that of this home did."""
        proof = response.headers.get(HOME_HEADER)
        if self._expected_proof is not None and proof != self._expected_proof:
            raise ServerDownError(
                f"the Prefect server of this home no longer listens at {self.url}: another program "
                "does; start the server with `lachesis serve`"
            )

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
                f"{self._find_next_step()}"
            ) from error

    def _find_next_step(self) -> str:
        if self._expected_proof is not None and is_serve_alive():
            return "`lachesis serve` starts it again by itself: try again in a few seconds"
        return "start it with `lachesis serve`"

    def _send_request(
        self, method: str, path: str, body: object, timeout: httpx.Timeout
    ) -> httpx.Response:
        """Send a request, by the connection that is kept open if there is any."""
        options: Json = {
            "json": body,
            "timeout": timeout,
            "auth": self._auth,
            "follow_redirects": True,
        }
        if self._client is not None:
            return self._client.request(method, self.url + path, **options)
        return request_service(method, self.url + path, **options)
