"""The HTTP routes of the Tinker protocol as SDK 0.38 speaks it. No tensor is touched here.

A submitted request is accepted at once and fails, if it must, through its future: a refused submission would leave a hole
in the client's numbering. Answers that repeat a 5xx would be retried for ever, so they are for faults of the server only.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, Header, HTTPException, Request, Response
from fastapi.responses import JSONResponse

from lachesis.base import http_errors
from lachesis.base.errors import EngineRequestError, StorageError
from lachesis.engine import protobuf_messages, rest_routes
from lachesis.engine.engine import Engine
from lachesis.engine.futures import Futures, Payload
from lachesis.engine.json_messages import (
    Body,
    CreateModel,
    CreateSampler,
    CreateSession,
    LoadWeights,
    OfModel,
    OptimStep,
    Retrieve,
    Sample,
    SaveForSampler,
    check_sdk,
)
from lachesis.engine.model_thread import CANCELLED, ModelThread, Work, refusal
from lachesis.engine.sample_request import MOST_SAMPLES

LONG_POLL_S = 30.0
MOST_WAITING = 10_000
"""Requests for samples that may wait; the client of one more pauses for a second, and asks again."""
PROTOBUF = "application/x-protobuf"
CLIENT_CONFIG = {
    # Chunks sent one after the other arrive in the order of their numbers, and a call is one chunk.
    "parallel_fwdbwd_chunks": False,
    "fwdbwd_max_chunk_len": 1_000_000,
    "fwdbwd_max_chunk_bytes_count": 500_000_000,
    "fwdbwd_dispatch_bytes_semaphore_size": 500_000_000,
    "sample_max_concurrent_requests": 400,
    "sample_join_sampling_session": True,
}


class Service:
    """The engine, its thread and its futures, behind the routes."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.futures = Futures()
        self.thread: ModelThread | None = None
        self.clients: dict[str, int] = {}
        self.latest: dict[str, int] = {}
        """The last sequence id of each model."""

    def submit(self, key: tuple[str, int | None], call: Work, **extra: Any) -> dict[str, Any]:
        """Queue `call` unless this request is already known. Requests of one model run in the order of their numbers, which is
        that of their arrival; a number may be left out, for good, and one that comes late is refused."""
        owner, number = key
        future, new = self.futures.submit((owner, number) if number is not None else None)
        if new:
            future.extra = extra
            latest = self.latest.get(owner, -1)
            if number is not None and number <= latest:
                message = (
                    f"the request with sequence id {number} came after that with {latest}; they are numbered as they are sent"
                )
                future.finish({"error": message, "category": "user"})
            else:
                if number is not None:
                    self.latest[owner] = number
                assert self.thread is not None
                self.thread.submit(future, call)
        return {"request_id": future.request_id, **future.extra}

    def sample(self, body: Sample) -> dict[str, Any]:
        assert self.thread is not None
        entry = self.engine.samplers.get(body.sampling_session_id)
        if entry is None:
            raise HTTPException(404, f"there is no sampler {body.sampling_session_id}; its session may have ended")
        if self.thread.waiting >= MOST_WAITING:
            raise HTTPException(429, f"{self.thread.waiting} requests wait for samples; ask again later", {"Retry-After": "1"})
        future, new = self.futures.submit((body.sampling_session_id, body.seq_id))
        if new:
            count = min(max(0, body.num_samples), MOST_SAMPLES)
            future.extra["sample_sequence_ids"] = [f"{future.request_id}-{index}" for index in range(count)]
            try:
                request = body.request(entry.served.base, future)
            except EngineRequestError as error:
                future.finish(refusal(error))
            else:
                entry.last_used = time.monotonic()
                self.thread.sample(future, entry.served.sampler, entry.snapshot, request)
        return {"request_id": future.request_id, **future.extra}

    async def call_soon(self, call: Callable[[], str]) -> str:
        """Run a short call on the model thread, before the operations that wait there.

        Raises:
            EngineRequestError: The call has raised it.
        """
        assert self.thread is not None
        return await asyncio.wrap_future(self.thread.call_soon(call))

    def cancel(self, request_id: str) -> str:
        """Cancel a request and return what has become of it.

        Returns:
            `ok` if it is cancelled now, `running` if it is an operation that has begun, whose
            effect and result stay, `finished` if it has its result or is not there.
        """
        assert self.thread is not None
        future = self.futures.get(request_id)
        if future is None or future.payload is not None:
            return "finished"
        if not self.thread.drop(future):
            return "running"
        future.cancelled = True
        future.finish(CANCELLED)
        return "ok"

    async def sweep(self) -> None:
        """End sessions whose client is gone."""
        while True:
            await asyncio.sleep(30)
            for session_id in self.engine.expired():
                self.end_session(session_id)

    def end_session(self, session_id: str) -> None:
        for known in (self.clients, self.latest):
            for one in [one for one in known if one.startswith(f"{session_id}:")]:
                del known[one]
        self.submit((f"end:{session_id}", None), lambda: self.engine.end_session(session_id))


def create_app(engine: Engine, token: str) -> FastAPI:
    """The application. Every call needs the header `X-API-Key: token`."""
    service = Service(engine)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.thread = ModelThread([served.sampler for served in engine.served.values()], asyncio.get_running_loop())
        sweeper = asyncio.create_task(service.sweep())
        yield
        sweeper.cancel()
        service.thread.stop()

    async def authorised(x_api_key: str = Header("")) -> None:
        if not hmac.compare_digest(x_api_key.encode(), token.encode()):
            raise HTTPException(401, "the X-API-Key header does not hold this engine's token (LACHESIS_ENGINE_TOKEN)")

    app = FastAPI(title="Lachesis embedded engine", lifespan=lifespan, openapi_url=None)
    guarded = APIRouter(prefix="/api/v1", dependencies=[Depends(authorised)])
    _add_session_routes(guarded, service)
    _add_training_routes(guarded, service)
    _add_state_routes(guarded, service)
    _add_sampling_routes(guarded, service)
    rest_routes.add(guarded, engine)
    app.include_router(guarded)
    app.include_router(rest_routes.downloads(engine))
    http_errors.add_error_handlers(app)
    app.add_exception_handler(EngineRequestError, _bad_request)
    app.add_exception_handler(StorageError, _bad_request)
    return app


async def _bad_request(request: Request, error: Exception) -> JSONResponse:
    return JSONResponse({"detail": http_errors.escape_surrogates(error)}, 400)


def _add_session_routes(router: APIRouter, service: Service) -> None:
    engine = service.engine

    @router.get("/healthz")
    async def healthz() -> dict[str, str]:
        return {"status": "ok"}

    @router.post("/client/config")
    async def client_config(body: CreateSession) -> dict[str, Any]:
        check_sdk(body.sdk_version)
        return CLIENT_CONFIG

    @router.post("/client/dynamic_config")
    async def dynamic_config() -> dict[str, Any]:
        return {"sample_cancel_enabled": True}

    @router.post("/telemetry")
    async def telemetry() -> dict[str, str]:
        return {"status": "accepted"}  # not stored: it can hold keys

    @router.get("/get_server_capabilities")
    async def capabilities() -> dict[str, Any]:
        models = [
            {
                "model_name": name,
                "max_context_length": served.base.context,
                "trainable": True,
                "sampleable": True,
            }
            for name, served in engine.served.items()
        ]
        return {"supported_models": models}

    @router.post("/create_session")
    async def create_session(body: CreateSession) -> dict[str, Any]:
        check_sdk(body.sdk_version)
        return {"type": "create_session", "session_id": engine.create_session(body.user_metadata)}

    @router.post("/session_heartbeat")
    async def heartbeat(body: Body) -> Response:
        known = engine.heartbeat(str((body.model_extra or {}).get("session_id")))
        return JSONResponse({"type": "session_heartbeat"}, 200 if known else 410)

    @router.post("/sessions/{session_id}/finish", status_code=204)
    async def finish(session_id: str) -> None:
        service.end_session(session_id)


def _add_training_routes(router: APIRouter, service: Service) -> None:
    engine = service.engine

    @router.post("/create_model")
    async def create_model(body: CreateModel) -> dict[str, Any]:
        _known_session(engine, body.session_id)
        model_id = f"{body.session_id}:train:{body.model_seq_id}"
        kind = (body.optimizer_config or {}).get("type", "adamw")
        spec = body.lora_spec()

        def call() -> Payload:
            if kind != "adamw":
                raise EngineRequestError(f"the optimizer {kind!r} is not offered; allowed: adamw")
            return engine.create_model(body.session_id, body.model_seq_id, body.base_model, spec, body.user_metadata)

        return service.submit((model_id, 0), call, model_id=model_id)

    @router.post("/get_info")
    async def get_info(body: OfModel) -> dict[str, Any]:
        model = engine.models.get(body.model_id)
        if model is None:
            raise HTTPException(404, f"there is no model {body.model_id}")
        source = model.base.source
        data = {"arch": model.base.module.config.model_type, "model_name": source, "tokenizer_id": source}
        return {
            "type": "get_info",
            "model_id": body.model_id,
            "model_data": data,
            "is_lora": True,
            "lora_rank": model.spec.rank,
            "model_name": source,
            "optimizer_config": {"type": "adamw"},
        }

    @router.post("/forward_backward")
    async def forward_backward(request: Request) -> dict[str, Any]:
        parsed = protobuf_messages.parse_forward_backward(await request.body())
        return service.submit((parsed.model_id, parsed.seq_id), lambda: engine.forward_backward(parsed))

    @router.post("/optim_step")
    async def optim_step(body: OptimStep) -> dict[str, Any]:
        def call() -> Payload:
            if body.optimizer_params is not None:
                raise EngineRequestError("optimizer_params are not offered; allowed: adam_params")
            return engine.optim_step(body.model_id, body.adam_params or {})

        return service.submit((body.model_id, body.seq_id), call)

    @router.post("/unload_model")
    async def unload_model(body: OfModel) -> dict[str, Any]:
        return service.submit((body.model_id, body.seq_id), lambda: engine.unload(body.model_id))


def _add_state_routes(router: APIRouter, service: Service) -> None:
    engine = service.engine

    def saver(kind: str) -> Callable[[OfModel], Any]:
        async def save(body: OfModel) -> dict[str, Any]:
            options = body.model_extra or {}
            return service.submit((body.model_id, body.seq_id), lambda: engine.save(body.model_id, kind, body.path, options))

        return save

    router.post("/save_weights")(saver("weights"))
    router.post("/save_weights_external")(saver("external_weights"))

    @router.post("/load_weights")
    async def load_weights(body: LoadWeights) -> dict[str, Any]:
        if body.model_id is not None:
            model_id = body.model_id
            return service.submit((model_id, body.seq_id), lambda: engine.load(model_id, body.path, optimizer=body.optimizer))
        session_id, number = body.session_id or "", body.model_seq_id or 0
        _known_session(engine, session_id)
        new_id = f"{session_id}:train:{number}"

        def create() -> Payload:
            return engine.create_from_state(
                session_id, number, body.path, optimizer=body.optimizer, metadata=body.user_metadata
            )

        return service.submit((new_id, 0), create, model_id=new_id)


def _add_sampling_routes(router: APIRouter, service: Service) -> None:
    engine = service.engine

    @router.post("/save_weights_for_sampler")
    async def save_weights_for_sampler(body: SaveForSampler) -> dict[str, Any]:
        key, number = (body.model_id, body.seq_id), body.sampling_session_seq_id
        if number is not None:
            return service.submit(key, lambda: engine.snapshot(body.model_id, number))
        options = body.model_extra or {}
        return service.submit(key, lambda: engine.save(body.model_id, "sampler_weights", body.path, options))

    @router.post("/create_sampling_session")
    async def create_sampling_session(body: CreateSampler) -> dict[str, Any]:
        _known_session(engine, body.session_id)
        # Files are read beside the model thread; what it owns is changed by it alone.
        served, snapshot = await asyncio.to_thread(engine.load_sampler, body.base_model, body.model_path)
        registered = service.call_soon(
            lambda: engine.add_sampler(body.session_id, body.sampling_session_seq_id, served, snapshot, body.model_path)
        )
        return {"sampling_session_id": await registered}

    @router.get("/samplers/{sampler_id}")
    async def sampler(sampler_id: str) -> dict[str, Any]:
        entry = engine.samplers.get(sampler_id)
        if entry is None:
            raise HTTPException(404, f"there is no sampler {sampler_id}")
        return {"sampler_id": sampler_id, "base_model": entry.served.base.source, "model_path": entry.model_path}

    @router.post("/join_sampling_session")
    async def join(body: Body) -> dict[str, int]:
        sampler_id = str((body.model_extra or {}).get("sampling_session_id"))
        service.clients[sampler_id] = service.clients.get(sampler_id, 0) + 1
        return {"client_counter": service.clients[sampler_id]}

    @router.post("/asample")
    async def asample(body: Sample) -> dict[str, Any]:
        return service.sample(body)

    @router.post("/cancel_future")
    async def cancel_future(body: Retrieve) -> dict[str, str]:
        return {"status": service.cancel(body.request_id)}

    @router.post("/retrieve_future")
    async def retrieve_future(body: Retrieve) -> Response:
        future = service.futures.get(body.request_id)
        if future is None:
            raise HTTPException(404, f"there is no request {body.request_id}; results are kept for ten minutes")
        payload = await future.wait(LONG_POLL_S)
        if payload is None:  # 408 makes the client ask again without a word in its log
            return JSONResponse({"type": "try_again", "request_id": body.request_id, "queue_state": "active"}, 408)
        if isinstance(payload, bytes):
            return Response(payload, media_type=PROTOBUF)
        return JSONResponse(payload)


def _known_session(engine: Engine, session_id: str) -> None:
    if session_id not in engine.sessions:
        raise HTTPException(404, f"there is no session {session_id}; this engine may have been restarted")
