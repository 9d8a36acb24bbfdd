"""Call a Tinker server over HTTP, and its SDK in all its versions."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import inspect
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import httpx

from lachesis.base.api_keys import read_key
from lachesis.base.errors import (
    BillingError,
    MissingDependencyError,
    MissingKeyError,
    ServerDownError,
    ServerProtocolError,
    shorten,
)
from lachesis.base.http_client import get_tls_context
from lachesis.base.json_text import Json

if TYPE_CHECKING:
    import tinker


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
    """Raise the error of a refused request: of the key, the account or the server."""
    # The server says 403 for a key that may not do this, so another key helps there too.
    if response.status_code in (401, 402, 403):
        raise make_access_error(response.status_code, _read_detail(response), url)
    if response.is_error:
        raise ServerDownError(
            f"the Tinker server at {url} answers {path} with HTTP {response.status_code}: "
            f"{_read_detail(response)}"
        )


def _read_json(response: httpx.Response, url: str) -> Json:
    """Return the JSON object of an answer, or raise ServerDownError if it is none."""
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
        f"the Tinker server at {url} rejected the key in TINKER_API_KEY (HTTP {status}: {detail}); "
        "set a valid key, restart `lachesis serve`, then run `lachesis resume RUN`"
    )


def _read_detail(response: httpx.Response) -> str:
    try:
        content = response.json()
    except ValueError:
        return shorten(response.text.strip() or response.reason_phrase)
    if isinstance(content, dict):
        return shorten(str(content.get("detail") or content.get("error") or content))
    return shorten(str(content))


async def call_sdk(client: object, name: str, *values: object, **options: object) -> Any:
    """Return the result of an operation of an SDK's client, such as `sample`.

    Raises:
        ServerProtocolError: The SDK refuses the server's answer.
        tinker.TinkerError: The operation has failed.
    """
    operation = getattr(client, f"{name}_async", None)
    if operation is None or hasattr(operation, "__deprecated__"):
        operation = getattr(client, name)
    with name_refused_answers():
        result = operation(*values, **options)
        if inspect.isawaitable(result):
            return await result
        if isinstance(result, concurrent.futures.Future):
            return await asyncio.wrap_future(result)
        return result


@contextlib.contextmanager
def name_refused_answers() -> Iterator[None]:
    """Raise ServerProtocolError where the SDK's own check of an answer fails during the block."""
    try:
        yield
    except AssertionError as error:
        raise ServerProtocolError(
            f"the Tinker SDK refuses an answer of the server at {get_base_url()}: "
            f"{error or 'it says no more'}. The server may be made for an older SDK; use a newer "
            "version of it, or let `tinker.backend` put our bridge before it"
        ) from error


def wait_for_sdk(result: object) -> Any:
    """Return the result of an operation of the SDK, waiting for its future if any."""
    get_result = getattr(result, "result", None)
    if get_result is None:
        return result
    return get_result()


async def end_session(service_client: tinker.ServiceClient, status: str) -> None:
    """End the session, which frees its memory on the server.

    Args:
        service_client: The client that has opened it.
        status: How its work ended: success, errored or interrupted.
    """
    if hasattr(service_client, "close"):
        await call_sdk(service_client, "close", status)
        return
    session_id = service_client.holder.get_session_id()
    path, body = f"sessions/{session_id}/finish", {"reason": {"type": status}}
    await asyncio.to_thread(request_tinker, "POST", path, read_key("TINKER_API_KEY"), json=body)


def make_rest_client(service_client: tinker.ServiceClient) -> tinker.RestClient:
    """Return a client of the server's checkpoints; this sends a request and blocks."""
    import tinker

    if hasattr(tinker, "RestClient"):
        return _make_rest_client()
    rest_client: tinker.RestClient = service_client.create_rest_client()
    return rest_client


def _make_rest_client() -> tinker.RestClient:
    import tinker
    from tinker.lib.base_url import resolve_base_url

    # Without an address it would be a client of the server that this process has asked first.
    return tinker.RestClient(base_url=resolve_base_url())


@contextlib.contextmanager
def open_service_client(
    user_metadata: dict[str, str] | None = None,
) -> Iterator[tinker.ServiceClient]:
    """Open a session with the server during the block."""
    import tinker

    service_client = tinker.ServiceClient(user_metadata=user_metadata)
    try:
        yield service_client
    finally:
        # Sessions of the oldest versions end by themselves, without a heartbeat.
        if hasattr(service_client, "close"):
            with contextlib.suppress(tinker.TinkerError):
                wait_for_sdk(service_client.close("success"))


@contextlib.contextmanager
def open_rest_client() -> Iterator[tinker.RestClient]:
    """Open a client of the server's checkpoints, where there is no session with the server yet."""
    import tinker

    if hasattr(tinker, "RestClient"):
        yield _make_rest_client()
        return
    with open_service_client() as service_client:
        yield make_rest_client(service_client)


def require_operation(client: object, name: str, purpose: str) -> None:
    """Raise MissingDependencyError if this version of the SDK does not have an operation."""
    if hasattr(client, name):
        return
    import tinker

    raise MissingDependencyError(
        f"version {tinker.__version__} of the Tinker SDK cannot {purpose}; install a newer one "
        "with `pip install --upgrade tinker`"
    )
