"""Ask a Tinker server without its SDK, which takes seconds to import.

Only what needs no session is asked here: what the server offers, and its checkpoints. Training and
sampling go through the SDK.
"""

from __future__ import annotations

from typing import Any

import httpx

from lachesis.base.errors import BillingError, MissingKeyError, ServerDownError, shorten
from lachesis.base.json_text import Json
from lachesis.base.keys import read_key
from lachesis.base.tls import get_tls_context

# Where the SDK sends its requests unless TINKER_BASE_URL says otherwise.
DEFAULT_BASE_URL = "https://tinker.thinkingmachines.dev/services/tinker-prod"
TIMEOUT_S = 20.0


def get_base_url() -> str:
    """Return the address of the Tinker server that this process uses."""
    return (read_key("TINKER_BASE_URL") or DEFAULT_BASE_URL).rstrip("/")


def request_tinker(method: str, path: str, key: str, **options: Any) -> Json:
    """Return the JSON answer of a Tinker server to one request; an empty answer is {}.

    `path` is what follows `/api/v1/`, and `options` are further ones of httpx, such as `json`.

    Raises:
        MissingKeyError: The server refuses the key.
        BillingError: The account cannot pay.
        ServerDownError: The server does not respond, or responds with an error.
    """
    url = get_base_url()
    try:
        response = httpx.request(
            method,
            f"{url}/api/v1/{path}",
            headers={"X-API-Key": key},
            timeout=TIMEOUT_S,
            verify=get_tls_context(),
            **options,
        )
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        reason = str(error) or type(error).__name__
        raise ServerDownError(
            f"the Tinker server at {url} does not answer: {reason}; check the network, and "
            "TINKER_BASE_URL if you have set it"
        ) from error
    _check_status(response, url, path)
    return _read_json(response, url)


def _check_status(response: httpx.Response, url: str, path: str) -> None:
    # The server says 403 for a key that may not do this, so another key helps there too.
    if response.status_code in (401, 402, 403):
        raise make_access_error(response.status_code, _read_detail(response), url)
    if response.is_error:
        raise ServerDownError(
            f"the Tinker server at {url} answers {path} with HTTP {response.status_code}: "
            f"{_read_detail(response)}"
        )


def _read_json(response: httpx.Response, url: str) -> Json:
    try:
        content = response.json() if response.content else {}
    except ValueError as error:
        raise ServerDownError(
            f"what answers at {url} is no Tinker server: its answer is not JSON; check "
            "TINKER_BASE_URL"
        ) from error
    return dict(content) if isinstance(content, dict) else {"content": content}


def make_access_error(status: int, detail: str, url: str) -> MissingKeyError | BillingError:
    """Return the error for a key that is refused (401, 403) or an account that cannot pay (402)."""
    if status == 402:
        return BillingError(
            f"the Tinker server at {url} asks for payment (HTTP 402: {detail}); add credit to the "
            "account of the key, then go on with `lachesis resume RUN`"
        )
    return MissingKeyError(
        f"the Tinker server at {url} refuses the key in TINKER_API_KEY (HTTP {status}: {detail}); "
        "set a valid one, start `lachesis serve` again with it, and go on with `lachesis resume "
        "RUN`"
    )


def _read_detail(response: httpx.Response) -> str:
    try:
        content = response.json()
    except ValueError:
        return shorten(response.text.strip() or response.reason_phrase)
    if isinstance(content, dict):
        return shorten(str(content.get("detail") or content.get("error") or content))
    return shorten(str(content))
