"""Define the HTTP routes of the Tinker protocol as the SDKs 0.27 to 0.38 use them.

No tensor is touched here.

A submitted request is accepted at once, and an error is reported through its future: if the
submission were refused, a number would be missing in the client's sequence of requests. The SDK
repeats requests that get a 5xx status, so these are used for faults of the server only.
"""

import asyncio
import contextlib
import hmac
from collections.abc import AsyncIterator, Callable
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, Header, HTTPException, Request, Response
from fastapi.responses import JSONResponse

from lachesis.base import http_server
from lachesis.base.errors import EngineRequestError, StorageError
from lachesis.tinker_server import listing_routes, protobuf_messages
from lachesis.tinker_server.engine_interface import TinkerEngine
from lachesis.tinker_server.futures import Payload
from lachesis.tinker_server.json_messages import (
    CreateModelBody,
    CreateSamplerBody,
    CreateSessionBody,
    LoadWeightsBody,
    ModelBody,
    OptimStepBody,
    RequestBody,
    RetrieveBody,
    SampleBody,
    SaveForSamplerBody,
    check_sdk_version,
)
from lachesis.tinker_server.request_queue import LONG_POLL_S, RequestDispatcher

PROTOBUF_MEDIA_TYPE = "application/x-protobuf"
CLIENT_CONFIG = {
    # Chunks that are sent one after the other arrive in order, so one call need not wait for all.
    "parallel_fwdbwd_chunks": False,
    "fwdbwd_max_chunk_len": 1_000_000,
    "fwdbwd_max_chunk_bytes_count": 500_000_000,
    "fwdbwd_dispatch_bytes_semaphore_size": 500_000_000,
    "sample_max_concurrent_requests": 400,
    "sample_join_sampling_session": True,
}


def create_app(engine: TinkerEngine, token: str) -> FastAPI:
    """Create the application; every request needs the header `X-API-Key: TOKEN`."""
    dispatcher = RequestDispatcher(engine)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        dispatcher.worker = engine.start_worker(asyncio.get_running_loop())
        expiry_task = asyncio.create_task(dispatcher.end_expired_sessions())
        yield
        expiry_task.cancel()
        dispatcher.worker.stop()

    async def require_token(x_api_key: str = Header("")) -> None:
        if not hmac.compare_digest(x_api_key.encode(), token.encode()):
            raise HTTPException(
                401,
                "the X-API-Key header does not hold this engine's token (LACHESIS_ENGINE_TOKEN)",
            )

    app = FastAPI(title="Lachesis embedded engine", lifespan=lifespan, openapi_url=None)
    authenticated_router = APIRouter(prefix="/api/v1", dependencies=[Depends(require_token)])
    _add_service_routes(authenticated_router, engine)
    _add_session_routes(authenticated_router, dispatcher)
    _add_model_routes(authenticated_router, dispatcher)
    _add_training_routes(authenticated_router, dispatcher)
    _add_weights_routes(authenticated_router, dispatcher)
    _add_sampler_routes(authenticated_router, dispatcher)
    _add_sampler_lookup_routes(authenticated_router, dispatcher)
    _add_future_routes(authenticated_router, dispatcher)
    listing_routes.add_rest_routes(authenticated_router, engine)
    app.include_router(authenticated_router)
    app.include_router(listing_routes.create_download_router(engine))
    http_server.add_error_handlers(app)
    app.add_exception_handler(EngineRequestError, _handle_bad_request)
    app.add_exception_handler(StorageError, _handle_bad_request)
    return app


async def _handle_bad_request(request: Request, error: Exception) -> JSONResponse:
    return JSONResponse({"detail": http_server.escape_surrogates(error)}, 400)


def _add_service_routes(router: APIRouter, engine: TinkerEngine) -> None:
    """Add the routes that the SDK asks about the server itself."""

    @router.get("/healthz")
    async def healthz() -> dict[str, str]:
        return {"status": "ok"}

    @router.post("/client/config")
    async def get_client_config(body: CreateSessionBody) -> dict[str, Any]:
        check_sdk_version(body.sdk_version)
        return CLIENT_CONFIG

    @router.post("/client/dynamic_config")
    async def get_dynamic_config() -> dict[str, Any]:
        return {"sample_cancel_enabled": True}

    @router.post("/telemetry")
    async def accept_telemetry() -> dict[str, str]:
        return {"status": "accepted"}  # Telemetry is not stored, because it may contain keys.

    @router.get("/get_server_capabilities")
    async def get_server_capabilities() -> dict[str, Any]:
        return {"supported_models": engine.describe_models()}


def _add_session_routes(router: APIRouter, dispatcher: RequestDispatcher) -> None:
    """Add the routes that create, keep alive and end sessions."""
    engine = dispatcher.engine

    @router.post("/create_session")
    async def create_session(body: CreateSessionBody) -> dict[str, Any]:
        check_sdk_version(body.sdk_version)
        return {"type": "create_session", "session_id": engine.create_session(body.user_metadata)}

    @router.post("/session_heartbeat")
    async def receive_heartbeat(body: RequestBody) -> Response:
        session_exists = engine.record_heartbeat(str((body.model_extra or {}).get("session_id")))
        return JSONResponse({"type": "session_heartbeat"}, 200 if session_exists else 410)

    @router.post("/sessions/{session_id}/finish", status_code=204)
    async def finish_session(session_id: str) -> None:
        dispatcher.end_session(session_id)


def _add_model_routes(router: APIRouter, dispatcher: RequestDispatcher) -> None:
    """Add the routes that create and describe models in training."""
    engine = dispatcher.engine

    @router.post("/create_model")
    async def create_model(body: CreateModelBody) -> dict[str, Any]:
        """Queue the creation of a model in training."""
        _require_session(engine, body.session_id)
        model_id = f"{body.session_id}:train:{body.model_seq_id}"
        spec = body.to_lora_spec()

        def create() -> Payload:
            _require_adamw(body)
            return engine.create_model(
                body.session_id, body.model_seq_id, body.base_model, spec, body.user_metadata
            )

        return dispatcher.submit((model_id, 0), create, model_id=model_id)

    @router.post("/get_info")
    async def get_info(body: ModelBody) -> dict[str, Any]:
        description = engine.describe_training_model(body.model_id)
        if description is None:
            raise HTTPException(404, f"there is no model {body.model_id}")
        return description

    @router.post("/unload_model")
    async def unload_model(body: ModelBody) -> dict[str, Any]:
        return dispatcher.submit(
            (body.model_id, body.seq_id), lambda: engine.unload_model(body.model_id)
        )


def _require_adamw(body: CreateModelBody) -> None:
    optimizer_type = (body.optimizer_config or {}).get("type", "adamw")
    if optimizer_type != "adamw":
        raise EngineRequestError(f"the optimizer {optimizer_type!r} is not offered; allowed: adamw")


def _add_training_routes(router: APIRouter, dispatcher: RequestDispatcher) -> None:
    """Add the routes of gradients and updates."""
    engine = dispatcher.engine

    @router.post("/forward_backward")
    async def forward_backward(request: Request) -> dict[str, Any]:
        parsed_request = protobuf_messages.parse_forward_backward(await request.body())
        return dispatcher.submit(
            (parsed_request.model_id, parsed_request.seq_id),
            lambda: engine.forward_backward(parsed_request),
        )

    @router.post("/optim_step")
    async def optim_step(body: OptimStepBody) -> dict[str, Any]:
        def take_step() -> Payload:
            if body.optimizer_params is not None:
                raise EngineRequestError("optimizer_params are not offered; allowed: adam_params")
            return engine.optim_step(body.model_id, body.adam_params or {})

        return dispatcher.submit((body.model_id, body.seq_id), take_step)


def _add_weights_routes(router: APIRouter, dispatcher: RequestDispatcher) -> None:
    """Add the routes that save and load weights."""
    engine = dispatcher.engine

    def make_save_route(kind: str) -> Callable[[ModelBody], Any]:
        """Return the route that saves weights of this kind."""

        async def save(body: ModelBody) -> dict[str, Any]:
            options = body.model_extra or {}
            return dispatcher.submit(
                (body.model_id, body.seq_id),
                lambda: engine.save_checkpoint(body.model_id, kind, body.path, options),
            )

        return save

    router.post("/save_weights")(make_save_route("weights"))
    router.post("/save_weights_external")(make_save_route("external_weights"))
    _add_load_route(router, dispatcher)


def _add_load_route(router: APIRouter, dispatcher: RequestDispatcher) -> None:
    """Add the route that loads weights into a model, or into a new model."""
    engine = dispatcher.engine

    @router.post("/load_weights")
    async def load_weights(body: LoadWeightsBody) -> dict[str, Any]:
        """Queue the loading of weights into a model, or into a new model."""
        if body.model_id is not None:
            model_id = body.model_id
            return dispatcher.submit(
                (model_id, body.seq_id),
                lambda: engine.load_checkpoint(model_id, body.path, with_optimizer=body.optimizer),
            )
        session_id, model_seq_id = body.session_id or "", body.model_seq_id or 0
        _require_session(engine, session_id)
        new_model_id = f"{session_id}:train:{model_seq_id}"

        def create() -> Payload:
            return engine.create_model_from_checkpoint(
                session_id,
                model_seq_id,
                body.path,
                with_optimizer=body.optimizer,
                metadata=body.user_metadata,
            )

        return dispatcher.submit((new_model_id, 0), create, model_id=new_model_id)


def _add_sampler_routes(router: APIRouter, dispatcher: RequestDispatcher) -> None:
    """Add the routes that create samplers."""
    engine = dispatcher.engine

    @router.post("/save_weights_for_sampler")
    async def save_weights_for_sampler(body: SaveForSamplerBody) -> dict[str, Any]:
        """Queue a sampler of the present weights, or a checkpoint for samplers."""
        key, sampling_seq_id = (body.model_id, body.seq_id), body.sampling_session_seq_id
        if sampling_seq_id is not None:
            return dispatcher.submit(
                key, lambda: engine.create_snapshot_sampler(body.model_id, sampling_seq_id)
            )
        options = body.model_extra or {}
        return dispatcher.submit(
            key,
            lambda: engine.save_checkpoint(body.model_id, "sampler_weights", body.path, options),
        )

    @router.post("/create_sampling_session")
    async def create_sampling_session(body: CreateSamplerBody) -> dict[str, Any]:
        _require_session(engine, body.session_id)
        # Another thread reads the files; only the worker changes the engine's state.
        register = await asyncio.to_thread(engine.prepare_sampler, body.base_model, body.model_path)
        registration = dispatcher.call_soon(
            lambda: register(body.session_id, body.sampling_session_seq_id)
        )
        return {"sampling_session_id": await registration}


def _add_sampler_lookup_routes(router: APIRouter, dispatcher: RequestDispatcher) -> None:
    """Add the routes that describe samplers and count their clients."""

    @router.get("/samplers/{sampler_id}")
    async def get_sampler(sampler_id: str) -> dict[str, Any]:
        """Return base model and checkpoint of a sampler."""
        entry = dispatcher.engine.samplers.get(sampler_id)
        if entry is None:
            raise HTTPException(404, f"there is no sampler {sampler_id}")
        return {
            "sampler_id": sampler_id,
            "base_model": entry.model_name,
            "model_path": entry.model_path,
        }

    @router.post("/join_sampling_session")
    async def join_sampling_session(body: RequestBody) -> dict[str, int]:
        sampler_id = str((body.model_extra or {}).get("sampling_session_id"))
        dispatcher.client_counts[sampler_id] = dispatcher.client_counts.get(sampler_id, 0) + 1
        return {"client_counter": dispatcher.client_counts[sampler_id]}


def _add_future_routes(router: APIRouter, dispatcher: RequestDispatcher) -> None:
    """Add the routes that sample, cancel, and fetch results."""

    @router.post("/asample")
    async def asample(body: SampleBody) -> dict[str, Any]:
        return dispatcher.submit_sample(body)

    @router.post("/cancel_future")
    async def cancel_future(body: RetrieveBody) -> dict[str, str]:
        return {"status": dispatcher.cancel(body.request_id)}

    @router.post("/retrieve_future")
    async def retrieve_future(body: RetrieveBody) -> Response:
        """Return a result, or status 408 where it is not there after a long poll."""
        future = dispatcher.futures.get(body.request_id)
        if future is None:
            raise HTTPException(
                404, f"there is no request {body.request_id}; results are kept for ten minutes"
            )
        payload = await future.wait(LONG_POLL_S)
        if payload is None:  # Status 408 makes the client retry without logging a warning.
            return JSONResponse(
                {"type": "try_again", "request_id": body.request_id, "queue_state": "active"}, 408
            )
        if isinstance(payload, bytes):
            return Response(payload, media_type=PROTOBUF_MEDIA_TYPE)
        return JSONResponse(payload)


def _require_session(engine: TinkerEngine, session_id: str) -> None:
    if session_id not in engine.sessions:
        raise HTTPException(
            404, f"there is no session {session_id}; this engine may have been restarted"
        )
