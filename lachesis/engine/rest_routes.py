"""Listing, describing, deleting and downloading of sessions, runs and checkpoints, as the `tinker` command uses them."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from datetime import UTC, datetime, timedelta
from typing import Any

from fastapi import APIRouter, HTTPException, Request
from fastapi.responses import FileResponse
from pydantic import BaseModel

from lachesis.engine.engine import Engine
from lachesis.engine.weights import CheckpointPath

_SECRET = secrets.token_bytes(32)


class Ttl(BaseModel):
    ttl_seconds: int | None = None


class TinkerPath(BaseModel):
    tinker_path: str


def add(router: APIRouter, engine: Engine) -> None:
    """Add the guarded routes."""
    _add_listing(router, engine)
    _add_checkpoints(router, engine)


def _add_listing(router: APIRouter, engine: Engine) -> None:
    @router.get("/sessions")
    async def sessions(limit: int = 20, offset: int = 0) -> dict[str, Any]:
        return {"sessions": list(engine.sessions)[offset : offset + limit]}

    @router.get("/sessions/{session_id}")
    async def one_session(session_id: str) -> dict[str, Any]:
        session = engine.sessions.get(session_id)  # the model's thread may remove it at any time
        if session is None:
            raise HTTPException(404, f"there is no session {session_id}")
        return {
            "training_run_ids": session.models,
            "sampler_ids": session.samplers,
            "user_metadata": session.metadata,
        }

    @router.get("/training_runs")
    async def training_runs(limit: int = 20, offset: int = 0) -> dict[str, Any]:
        runs = [_run(engine, record) for record in engine.store.runs()]
        cursor = {"offset": offset, "limit": limit, "total_count": len(runs)}
        return {"training_runs": runs[offset : offset + limit], "cursor": cursor}

    @router.get("/training_runs/{run_id}")
    async def training_run(run_id: str) -> dict[str, Any]:
        for record in engine.store.runs():
            if record["training_run_id"] == run_id:
                return _run(engine, record)
        raise HTTPException(404, f"there is no training run {run_id}")

    @router.get("/checkpoints")
    async def checkpoints(limit: int = 100, offset: int = 0) -> dict[str, Any]:
        names = engine.store.names()
        cursor = {"offset": offset, "limit": limit, "total_count": len(names)}
        return {"checkpoints": [engine.store.describe(one) for one in names[offset : offset + limit]], "cursor": cursor}

    @router.post("/weights_info")
    async def weights_info(body: TinkerPath) -> dict[str, Any]:
        about = engine.store.about(CheckpointPath.parse(body.tinker_path))
        lora = about["lora"]
        parts = {key: lora[key] for key in ("train_unembed", "train_mlp", "train_attn")}
        return {"base_model": about["base_model"], "is_lora": True, "lora_rank": lora["rank"], **parts}


def _add_checkpoints(router: APIRouter, engine: Engine) -> None:
    base = "/training_runs/{run_id}/checkpoints"

    @router.get(base)
    async def of_run(run_id: str) -> dict[str, Any]:
        return {"checkpoints": [engine.store.describe(one) for one in engine.store.names(run_id)]}

    @router.put(base + "/{checkpoint_id:path}/ttl", status_code=204)
    async def set_ttl(run_id: str, checkpoint_id: str, body: Ttl) -> None:
        engine.store.set_ttl(_path(run_id, checkpoint_id), body.ttl_seconds)

    @router.get(base + "/{checkpoint_id:path}/external_weights_urls")
    async def urls(run_id: str, checkpoint_id: str, request: Request) -> dict[str, Any]:
        path = _path(run_id, checkpoint_id)
        engine.store.about(path)
        address = f"{request.base_url}download/{_signature(path)}/{path.run}/{path.kind}/{path.name}"
        files = sorted(file.name for file in engine.store.folder(path).iterdir())
        expires = (datetime.now(UTC) + timedelta(hours=1)).isoformat()
        return {"urls": {name: f"{address}/{name}" for name in files}, "expires": expires}

    # Both may be repeated: the SDK would send a request again for minutes after a 409.
    @router.post(base + "/{checkpoint_id:path}/publish", status_code=204)
    async def publish(run_id: str, checkpoint_id: str) -> None:
        engine.store.set_public(_path(run_id, checkpoint_id), True)

    @router.delete(base + "/{checkpoint_id:path}/publish", status_code=204)
    async def unpublish(run_id: str, checkpoint_id: str) -> None:
        engine.store.set_public(_path(run_id, checkpoint_id), False)

    @router.delete(base + "/{checkpoint_id:path}", status_code=204)
    async def delete(run_id: str, checkpoint_id: str) -> None:
        engine.store.delete(_path(run_id, checkpoint_id))


def downloads(engine: Engine) -> APIRouter:
    """Files by signed address: the client fetches them without its key."""
    router = APIRouter()

    @router.get("/download/{signature}/{run_id}/{kind}/{name}/{file}")
    async def download(signature: str, run_id: str, kind: str, name: str, file: str) -> FileResponse:
        path = CheckpointPath.parse(f"tinker://{run_id}/{kind}/{name}")
        if not hmac.compare_digest(signature.encode(), _signature(path).encode()):
            raise HTTPException(403, "the address is not one that this engine signed")
        target = engine.store.folder(path) / file
        if file != target.name or not target.is_file():
            raise HTTPException(404, f"{path} has no file {file}")
        return FileResponse(target)

    return router


def _signature(path: CheckpointPath) -> str:
    return hmac.new(_SECRET, str(path).encode(), hashlib.sha256).hexdigest()


def _path(run_id: str, checkpoint_id: str) -> CheckpointPath:
    return CheckpointPath.parse(f"tinker://{run_id}/{checkpoint_id}")


def _run(engine: Engine, record: dict[str, Any]) -> dict[str, Any]:
    described = [engine.store.describe(name) for name in engine.store.names(record["training_run_id"])]
    training = [one for one in described if one["checkpoint_type"] == "training"]
    samplers = [one for one in described if one["checkpoint_type"] == "sampler"]
    return {
        "training_run_id": record["training_run_id"],
        "base_model": record["base_model"],
        "model_owner": "local",
        "is_lora": True,
        "corrupted": False,
        "lora_rank": record["lora"]["rank"],
        "last_request_time": record["last_request_time"],
        "last_checkpoint": training[-1] if training else None,
        "last_sampler_checkpoint": samplers[-1] if samplers else None,
        "user_metadata": record["user_metadata"],
    }
