"""Send requests to the engine behind the bridge, and wait for their results.

It speaks the Tinker protocol as the SDK 0.25 does: a request is answered with an id at once, and
its result is fetched by long polling.
"""

import collections
import itertools
import threading
import time
from collections.abc import Sequence
from typing import Any

import httpx

from lachesis.base.errors import EngineRequestError, ServerDownError, shorten
from lachesis.base.http_client import open_service_client
from lachesis.base.json_text import Json
from lachesis.skyrl_bridge.messages import PassResult, decode_pass, encode_pass
from lachesis.tinker_server.protobuf_messages import DecodedDatum

# The version of the SDK whose protocol is spoken here; engines refuse older ones.
SDK_VERSION = "0.25.0"
HEARTBEAT_S = 10.0
# An engine holds the question for a result for up to five minutes.
POLL_TIMEOUT = httpx.Timeout(330.0, connect=10.0)
# How often a question is repeated whose answer was lost, and how long in between.
MAX_TRIES, PAUSE_S = 4, 0.5
PROTOBUF = "application/x-protobuf"
Body = bytes | dict[str, Any]


class UpstreamClient:
    """Hold a session with the engine; several threads may use it."""

    def __init__(self, url: str, key: str) -> None:
        self.url, self._headers = f"{url.rstrip('/')}/api/v1/", {"X-API-Key": key}
        self._client = open_service_client(
            headers=self._headers,
            timeout=POLL_TIMEOUT,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
        )
        self.session_id = ""
        self._model_counter, self._sampler_counter = itertools.count(), itertools.count()
        # The next sequence id of each model.
        self._sequence_ids: dict[str, itertools.count[int]] = collections.defaultdict(
            lambda: itertools.count(1)
        )
        self._stopping = threading.Event()

    # --- transport

    def call(self, method: str, path: str, body: Body | None = None) -> httpx.Response:
        """Send one request and return its response.

        Raises:
            EngineRequestError: The engine refuses it.
            ServerDownError: The engine does not answer.
        """
        options: dict[str, Any] = {"json": body} if isinstance(body, dict) else {}
        if isinstance(body, bytes):
            options = {"content": body, "headers": {"content-type": PROTOBUF}}
        try:
            response = self._client.request(method, self.url + path, **options)
        except httpx.HTTPError as error:
            raise make_silence_error(self.url, error) from error
        check_response(response, path)
        return response

    def submit(self, path: str, body: Body) -> Json:
        """Submit an operation and return the engine's first answer, which has its `request_id`."""
        return dict(self.call("POST", path, body).json())

    def wait(self, request_id: str, *, is_protobuf: bool = False) -> bytes | Json:
        """Return the result of a request.

        Raises:
            EngineRequestError: The operation has failed.
            ServerDownError: The engine does not answer.
        """
        while True:
            response = self._ask_for_result(request_id, is_protobuf)
            result = read_result(response)
            if result is not None:
                return result

    def _ask_for_result(self, request_id: str, is_protobuf: bool) -> httpx.Response:
        """Ask for a request's result, at longer intervals while the engine is silent."""
        headers = {"accept": PROTOBUF} if is_protobuf else {}
        for num_tries in range(MAX_TRIES):
            try:
                return self._client.post(
                    f"{self.url}retrieve_future", json={"request_id": request_id}, headers=headers
                )
            except httpx.HTTPError as error:
                last_error = error
                self._stopping.wait(PAUSE_S * 2**num_tries)
        raise make_silence_error(self.url, last_error)

    def run(self, path: str, body: Body) -> Json:
        """Submit an operation and return its result."""
        result = self.wait(str(self.submit(path, body)["request_id"]))
        return {} if isinstance(result, bytes) else result

    # --- the session

    def open(self) -> None:
        """Start a session, which is kept alive until `close`."""
        body = {
            "tags": ["lachesis"],
            "user_metadata": {},
            "sdk_version": SDK_VERSION,
            "type": "create_session",
        }
        self.session_id = str(self.submit("create_session", body)["session_id"])
        threading.Thread(target=self._send_heartbeats, name="heartbeat", daemon=True).start()

    def _send_heartbeats(self) -> None:
        body = {"session_id": self.session_id, "type": "session_heartbeat"}
        while not self._stopping.wait(HEARTBEAT_S):
            try:
                self.call("POST", "session_heartbeat", body)
            except (EngineRequestError, ServerDownError):
                continue  # The next operation reports it.

    def close(self) -> None:
        """Stop the heartbeats and close all connections."""
        self._stopping.set()
        self._client.close()

    def list_models(self) -> list[str]:
        """Return the names of the base models that the engine serves."""
        models = self.call("GET", "get_server_capabilities").json().get("supported_models") or []
        return [str(model["model_name"]) for model in models]

    def wait_until_up(self, timeout_s: float) -> None:
        """Wait until the engine answers at all.

        Raises:
            ServerDownError: It does not.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                self.call("GET", "healthz")
                return
            except ServerDownError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.5)

    # --- models

    def create_model(self, base_model: str, rank: int, seed: int | None) -> str:
        """Create an adapter and return its id."""
        body: dict[str, Any] = {
            "session_id": self.session_id,
            "model_seq_id": next(self._model_counter),
            "base_model": base_model,
            "lora_config": {"rank": rank, **({} if seed is None else {"seed": seed})},
            "type": "create_model",
        }
        answer = self.submit("create_model", body)
        result = self.wait(str(answer["request_id"]))
        details = result if isinstance(result, dict) else {}
        return str(answer.get("model_id") or details["model_id"])

    def unload_model(self, model_id: str) -> None:
        """Free the memory of an adapter."""
        self._sequence_ids.pop(model_id, None)
        self.run("unload_model", {"model_id": model_id, "type": "unload_model"})

    def run_pass(
        self,
        model_id: str,
        data: Sequence[DecodedDatum],
        loss_fn: str,
        loss_config: dict[str, float],
        *,
        forward_only: bool,
    ) -> PassResult:
        """Make a forward or forward-backward pass and return its losses and log-probabilities."""
        seq_id = next(self._sequence_ids[model_id])
        body = encode_pass(model_id, seq_id, data, loss_fn, loss_config, forward_only=forward_only)
        request_id = str(self.submit("forward_backward", body)["request_id"])
        result = self.wait(request_id, is_protobuf=True)
        if isinstance(result, dict):
            raise EngineRequestError(f"a pass was answered by {shorten(str(result))}")
        return decode_pass(result)

    def optim_step(self, model_id: str, adam_params: dict[str, float]) -> dict[str, float]:
        """Take an optimizer step and return its metrics."""
        result = self.run(
            "optim_step", {**self._name(model_id), "adam_params": adam_params, "type": "optim_step"}
        )
        return {name: float(value) for name, value in (result.get("metrics") or {}).items()}

    def save_state(self, model_id: str, name: str) -> str:
        """Save weights and optimizer, and return their `tinker://` path."""
        body = {**self._name(model_id), "path": name, "type": "save_weights"}
        return str(self.run("save_weights", body)["path"])

    def load_state(self, model_id: str, path: str, *, with_optimizer: bool) -> None:
        """Load weights into an adapter that has had no request yet."""
        body = {
            **self._name(model_id),
            "path": path,
            "optimizer": with_optimizer,
            "type": "load_weights",
        }
        self.run("load_weights", body)

    def save_for_sampler(self, model_id: str, name: str) -> str:
        """Save the weights for sampling, and return their `tinker://` path."""
        body = {**self._name(model_id), "path": name, "type": "save_weights_for_sampler"}
        path = str(self.run("save_weights_for_sampler", body)["path"])
        owner, *_, checkpoint = path.removeprefix("tinker://").split("/")
        # Some engines leave out the kind.
        return f"tinker://{owner}/sampler_weights/{checkpoint}"

    def _name(self, model_id: str) -> dict[str, Any]:
        return {"model_id": model_id, "seq_id": next(self._sequence_ids[model_id])}

    # --- checkpoints and samplers

    def create_sampler(self, *, base_model: str | None = None, path: str | None = None) -> str:
        """Start a sampling session with a base model or with saved weights, and return its id."""
        body: dict[str, Any] = {
            "session_id": self.session_id,
            "sampling_session_seq_id": next(self._sampler_counter),
            "type": "create_sampling_session",
            **({"base_model": base_model} if path is None else {"model_path": path}),
        }
        return str(self.submit("create_sampling_session", body)["sampling_session_id"])

    def download_archive(self, path: str) -> bytes:
        """Return the tar archive of weights that were saved for sampling."""
        model_id, _, name = path.removeprefix("tinker://").split("/")
        route = f"training_runs/{model_id}/checkpoints/{name}/archive"
        response = self.call("GET", route)
        if response.is_redirect:
            response = self._client.get(response.headers["location"])
            check_response(response, route)
        return response.content

    def delete_checkpoint(self, path: str) -> None:
        """Delete a checkpoint."""
        model_id, kind, name = path.removeprefix("tinker://").split("/")
        self.call("DELETE", f"training_runs/{model_id}/checkpoints/{kind}/{name}")


def check_response(response: httpx.Response, path: str) -> None:
    """Raise an error for a response that refuses a request or reports a failure."""
    if response.status_code >= 500:
        raise ServerDownError(
            f"the engine answers {path} with HTTP {response.status_code}: "
            f"{shorten(response.text)}; see its log"
        )
    if response.status_code >= 400:
        raise EngineRequestError(f"the engine refuses {path}: {read_detail(response)}")


def read_detail(response: httpx.Response) -> str:
    """Return the reason that a response gives for a refusal."""
    try:
        content = response.json()
    except ValueError:
        return shorten(response.text or response.reason_phrase)
    if isinstance(content, dict):
        return shorten(str(content.get("detail") or content.get("error") or content))
    return shorten(str(content))


def make_silence_error(url: str, error: httpx.HTTPError) -> ServerDownError:
    """Return the error for an engine that has not answered."""
    return ServerDownError(
        f"the engine at {url} does not answer: {error or type(error).__name__}; see its log, then "
        "go on with `lachesis resume RUN`"
    )


def read_result(response: httpx.Response) -> bytes | Json | None:
    """Return the result that a response holds; None if there is none yet.

    Raises:
        EngineRequestError: The operation has failed.
        ServerDownError: The engine has failed.
    """
    if response.status_code == 408:
        return None
    check_response(response, "retrieve_future")
    if response.headers.get("content-type", "").startswith(PROTOBUF):
        return response.content
    content = response.json()
    result: Json = content if isinstance(content, dict) else {}
    if result.get("type") == "try_again":
        return None
    if "error" in result:
        raise EngineRequestError(shorten(str(result["error"]), 1000))
    return result
