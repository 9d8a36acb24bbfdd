"""Let the `tinker` command list, describe, delete and download sessions, runs and checkpoints."""

import hashlib
import hmac
import re
import secrets
import time
from datetime import UTC, datetime, timedelta
from typing import Any

from fastapi import APIRouter, HTTPException, Request
from fastapi.responses import FileResponse
from pydantic import BaseModel

from lachesis.tinker_server.checkpoint_store import CheckpointPath
from lachesis.tinker_server.engine_interface import TinkerEngine

# How long a download address works.
URL_LIFETIME_S = 3600
_SIGNING_KEY = secrets.token_bytes(32)


class TtlBody(BaseModel):
    ttl_seconds: int | None = None


class TinkerPathBody(BaseModel):
    tinker_path: str


def add_rest_routes(router: APIRouter, engine: TinkerEngine) -> None:
    """Add the routes that need the engine's token."""
    _add_listing_routes(router, engine)
    _add_checkpoint_routes(router, engine)
    _add_weights_info_route(router, engine)


def _add_listing_routes(router: APIRouter, engine: TinkerEngine) -> None:
    """Add the routes that list sessions, runs and checkpoints."""
    _add_session_routes(router, engine)

    @router.get("/training_runs")
    async def list_training_runs(limit: int = 20, offset: int = 0) -> dict[str, Any]:
        runs = [_describe_run(engine, record) for record in engine.store.list_runs()]
        cursor = {"offset": offset, "limit": limit, "total_count": len(runs)}
        return {"training_runs": runs[offset : offset + limit], "cursor": cursor}

    @router.get("/training_runs/{run_id}")
    async def get_training_run(run_id: str) -> dict[str, Any]:
        for record in engine.store.list_runs():
            if record["training_run_id"] == run_id:
                return _describe_run(engine, record)
        raise HTTPException(404, f"there is no training run {run_id}")

    @router.get("/checkpoints")
    async def list_checkpoints(limit: int = 100, offset: int = 0) -> dict[str, Any]:
        names = engine.store.list_checkpoints()
        cursor = {"offset": offset, "limit": limit, "total_count": len(names)}
        return {
            "checkpoints": [engine.store.describe(name) for name in names[offset : offset + limit]],
            "cursor": cursor,
        }


def _add_session_routes(router: APIRouter, engine: TinkerEngine) -> None:
    """Add the routes that list and describe sessions."""

    @router.get("/sessions")
    async def list_sessions(limit: int = 20, offset: int = 0) -> dict[str, Any]:
        return {"sessions": list(engine.sessions)[offset : offset + limit]}

    @router.get("/sessions/{session_id}")
    async def get_session(session_id: str) -> dict[str, Any]:
        """Return the runs and samplers of a session."""
        session = engine.sessions.get(session_id)  # The worker may remove it at any time.
        if session is None:
            raise HTTPException(404, f"there is no session {session_id}")
        return {
            "training_run_ids": session.model_ids,
            "sampler_ids": session.sampler_ids,
            "user_metadata": session.metadata,
        }


def _add_weights_info_route(router: APIRouter, engine: TinkerEngine) -> None:
    """Add the route that describes the weights of a checkpoint."""

    @router.post("/weights_info")
    async def get_weights_info(body: TinkerPathBody) -> dict[str, Any]:
        """Return base model, rank and trained layers of a checkpoint."""
        checkpoint_record = engine.store.read_record(CheckpointPath.parse(body.tinker_path))
        lora = checkpoint_record["lora"]
        train_flags = {key: lora[key] for key in ("train_unembed", "train_mlp", "train_attn")}
        return {
            "base_model": checkpoint_record["base_model"],
            "is_lora": True,
            "lora_rank": lora["rank"],
            **train_flags,
        }


def _add_checkpoint_routes(router: APIRouter, engine: TinkerEngine) -> None:
    """Add the routes that list, expire and download the checkpoints of a run."""
    route_prefix = "/training_runs/{run_id}/checkpoints"

    @router.get(route_prefix)
    async def list_run_checkpoints(run_id: str) -> dict[str, Any]:
        return {
            "checkpoints": [
                engine.store.describe(name) for name in engine.store.list_checkpoints(run_id)
            ]
        }

    @router.put(route_prefix + "/{checkpoint_id:path}/ttl", status_code=204)
    async def set_ttl(run_id: str, checkpoint_id: str, body: TtlBody) -> None:
        engine.store.set_ttl(_parse_checkpoint_path(run_id, checkpoint_id), body.ttl_seconds)

    @router.get(route_prefix + "/{checkpoint_id:path}/external_weights_urls")
    async def get_download_urls(
        run_id: str, checkpoint_id: str, request: Request
    ) -> dict[str, Any]:
        """Return signed addresses of a checkpoint's files, and until when they work."""
        path = _parse_checkpoint_path(run_id, checkpoint_id)
        engine.store.read_record(path)
        expires = datetime.now(UTC) + timedelta(seconds=URL_LIFETIME_S)
        signature = _sign_path(path, int(expires.timestamp()))
        folder_url = f"{request.base_url}download/{signature}/{path.run}/{path.kind}/{path.name}"
        files = sorted(file.name for file in engine.store.find_folder(path).iterdir())
        urls = {name: f"{folder_url}/{name}" for name in files}
        return {"urls": urls, "expires": expires.isoformat()}

    _add_checkpoint_actions(router, engine, route_prefix)


def _add_checkpoint_actions(router: APIRouter, engine: TinkerEngine, route_prefix: str) -> None:
    """Add the routes that publish, withdraw and delete a checkpoint."""

    # Publishing and unpublishing may be repeated: the SDK would retry for minutes after a 409.
    @router.post(route_prefix + "/{checkpoint_id:path}/publish", status_code=204)
    async def publish(run_id: str, checkpoint_id: str) -> None:
        engine.store.set_public(_parse_checkpoint_path(run_id, checkpoint_id), True)

    @router.delete(route_prefix + "/{checkpoint_id:path}/publish", status_code=204)
    async def unpublish(run_id: str, checkpoint_id: str) -> None:
        engine.store.set_public(_parse_checkpoint_path(run_id, checkpoint_id), False)

    @router.delete(route_prefix + "/{checkpoint_id:path}", status_code=204)
    async def delete(run_id: str, checkpoint_id: str) -> None:
        engine.store.delete(_parse_checkpoint_path(run_id, checkpoint_id))


def create_download_router(engine: TinkerEngine) -> APIRouter:
    """Serve checkpoint files under signed URLs, as clients load them without a key."""
    router = APIRouter()

    @router.get("/download/{signature}/{run_id}/{kind}/{name}/{file}")
    async def download(
        signature: str, run_id: str, kind: str, name: str, file: str
    ) -> FileResponse:
        """Return a file whose address was signed here and has not expired."""
        path = CheckpointPath.parse(f"tinker://{run_id}/{kind}/{name}")
        expiry_text = signature.partition("-")[0]
        expires = int(expiry_text) if re.fullmatch("[0-9]{1,15}", expiry_text) else 0
        if not hmac.compare_digest(signature.encode(), _sign_path(path, expires).encode()):
            raise HTTPException(403, "this engine has not signed the URL; request a new one")
        if expires < time.time():
            raise HTTPException(403, "the URL has expired; request a new one")
        target = engine.store.find_folder(path) / file
        if file != target.name or not target.is_file():
            raise HTTPException(404, f"{path} has no file {file}")
        return FileResponse(target)

    return router


def _sign_path(path: CheckpointPath, expires: int) -> str:
    """Return a signature that begins with the time until which it is valid, in Unix seconds."""
    digest = hmac.new(_SIGNING_KEY, f"{expires} {path}".encode(), hashlib.sha256).hexdigest()
    return f"{expires}-{digest}"


def _parse_checkpoint_path(run_id: str, checkpoint_id: str) -> CheckpointPath:
    return CheckpointPath.parse(f"tinker://{run_id}/{checkpoint_id}")


def _describe_run(engine: TinkerEngine, record: dict[str, Any]) -> dict[str, Any]:
    """Return a run with its newest checkpoints, as the protocol describes it."""
    checkpoints = [
        engine.store.describe(name)
        for name in engine.store.list_checkpoints(record["training_run_id"])
    ]
    training_checkpoints = [
        checkpoint for checkpoint in checkpoints if checkpoint["checkpoint_type"] == "training"
    ]
    sampler_checkpoints = [
        checkpoint for checkpoint in checkpoints if checkpoint["checkpoint_type"] == "sampler"
    ]
    return {
        "training_run_id": record["training_run_id"],
        "base_model": record["base_model"],
        "model_owner": "local",
        "is_lora": True,
        "corrupted": False,
        "lora_rank": record["lora"]["rank"],
        "last_request_time": record["last_request_time"],
        "last_checkpoint": training_checkpoints[-1] if training_checkpoints else None,
        "last_sampler_checkpoint": sampler_checkpoints[-1] if sampler_checkpoints else None,
        "user_metadata": record["user_metadata"],
    }
