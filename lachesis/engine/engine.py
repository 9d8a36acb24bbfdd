"""What the engine knows: sessions, models in training, samplers, checkpoints. Every method answers for one request.

Methods named after an operation run on the model thread and return its JSON or protobuf result; one that takes long is a
generator, which lets other work in between.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from lachesis.base.errors import EngineRequestError
from lachesis.engine import lora, protobuf_messages, weights
from lachesis.engine.futures import Payload
from lachesis.engine.lora import LoraSpec, Snapshot
from lachesis.engine.model import BaseModel
from lachesis.engine.sampler import Sampler
from lachesis.engine.training import TrainingModel

FREEZE = "freeze-weights"
"""A file of this name in the store makes updates change nothing: the switch with which the judgement of learning is tested."""
SNAPSHOTS_PER_SESSION = 16
"""Unnamed sampler weights kept per session; the least recently used goes first."""
SESSION_EXPIRY_S = 900.0
"""A session that has sent no heartbeat (every 10 s) for this long is over, and its memory is freed."""


@dataclass
class Session:
    """One client process."""

    session_id: str
    metadata: dict[str, str]
    last_seen: float = field(default_factory=time.monotonic)
    models: list[str] = field(default_factory=list)
    samplers: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class ServedModel:
    """A base model and what samples from it."""

    base: BaseModel
    sampler: Sampler


@dataclass
class SamplerEntry:
    """Frozen weights that can be sampled; `snapshot` None is the base model."""

    sampler_id: str
    served: ServedModel
    snapshot: Snapshot | None
    model_path: str | None
    last_used: float = field(default_factory=time.monotonic)


class Engine:
    """The state behind the HTTP routes."""

    def __init__(
        self,
        model: str,
        store: Path,
        *,
        further: Sequence[str] = (),
        seed: int | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Load the models and keep all of them in memory.

        Args:
            model: A folder or a Hub name. Checkpoints that name no model of this engine are its.
            store: The folder of the checkpoints.
            further: More models that can be sampled and trained, such as a teacher.
            seed: The seed of sampling requests that bring none.
            dtype: Of the base models' weights.

        Raises:
            ModelNotFoundError: A model cannot be loaded.
            UnsupportedModelError: A model cannot be served correctly.
        """
        self.served: dict[str, ServedModel] = {}
        for name in dict.fromkeys([model, *further]):
            base = BaseModel(name, dtype=dtype)
            self.served[name] = ServedModel(base, Sampler(base, seed))
        self.main = self.served[model]
        self.store = weights.WeightsStore(store)
        self.sessions: dict[str, Session] = {}
        self.models: dict[str, TrainingModel] = {}
        self.samplers: dict[str, SamplerEntry] = {}

    # --- sessions ---------------------------------------------------------------------------------------------------

    def create_session(self, metadata: dict[str, Any] | None) -> str:
        session = Session(uuid.uuid4().hex[:12], {key: str(value) for key, value in (metadata or {}).items()})
        self.sessions[session.session_id] = session
        return session.session_id

    def heartbeat(self, session_id: str) -> bool:
        session = self.sessions.get(session_id)
        if session:
            session.last_seen = time.monotonic()
        return session is not None

    def expired(self) -> list[str]:
        horizon = time.monotonic() - SESSION_EXPIRY_S
        # A copy: the model thread ends sessions while this runs.
        return [session.session_id for session in list(self.sessions.values()) if session.last_seen < horizon]

    def end_session(self, session_id: str) -> Payload:
        """Free what the session holds in memory; its checkpoints stay."""
        session = self.sessions.pop(session_id, None)
        for model_id in session.models if session else ():
            self.models.pop(model_id, None)
        for sampler_id in session.samplers if session else ():
            self.samplers.pop(sampler_id, None)
        self._forget_adapters()
        return {}

    def unload(self, model_id: str) -> Payload:
        """Free one model of a living session."""
        self._model(model_id)
        del self.models[model_id]
        for session in list(self.sessions.values()):
            if model_id in session.models:
                session.models.remove(model_id)
        self._forget_adapters()
        return {"model_id": model_id}

    # --- training ---------------------------------------------------------------------------------------------------

    def create_model(self, session_id: str, model_seq_id: int, base_model: str, spec: LoraSpec, metadata: Any) -> Payload:
        base = self._served_model(base_model).base
        return {"model_id": self._add_model(session_id, model_seq_id, base, spec, metadata)}

    def _add_model(self, session_id: str, model_seq_id: int, base: BaseModel, spec: LoraSpec, metadata: Any) -> str:
        model_id = f"{session_id}:train:{model_seq_id}"
        if model_id not in self.models:  # the client re-sends a creation whose answer was lost
            if session_id not in self.sessions:
                raise EngineRequestError(f"the session {session_id} has ended")
            self.models[model_id] = TrainingModel(base, spec)
            self.sessions[session_id].models.append(model_id)
            record = {"training_run_id": model_id, "base_model": base.source, "lora": spec.as_dict()}
            record["user_metadata"] = {key: str(value) for key, value in (metadata or {}).items()}
            self.store.save_run(model_id, {**record, "last_request_time": datetime.now(UTC).isoformat()})
        return model_id

    def forward_backward(self, request: protobuf_messages.ForwardBackward) -> Generator[None, None, Payload]:
        """Yields between the passes of one request."""
        model = self._model(request.model_id)
        data = protobuf_messages.decode_data(request)
        logprobs_D, metrics = yield from model.forward_backward(
            data, request.loss_fn, request.loss_config, forward_only=request.forward_only
        )
        return protobuf_messages.encode_forward_backward(logprobs_D, metrics)

    def optim_step(self, model_id: str, adam: dict[str, Any]) -> Payload:
        frozen = (self.store.root / FREEZE).exists()
        return {"metrics": self._model(model_id).optim_step({**adam, "learning_rate": 0.0} if frozen else adam)}

    # --- checkpoints ------------------------------------------------------------------------------------------------

    def save(self, model_id: str, kind: str, name: str | None, body: dict[str, Any]) -> Payload:
        """Write a checkpoint; Adam's state goes with kind `weights`."""
        model = self._model(model_id)
        path = weights.CheckpointPath(model_id, kind, name or uuid.uuid4().hex[:8])
        size = self.store.save(
            path,
            tensors=lora.to_tensors(model.factors),
            config=self._peft_config(model),
            optimizer=model.optimizer_tensors() if kind == "weights" else None,
            about={"lora": model.spec.as_dict(), "base_model": model.base.source, "user_metadata": body.get("user_metadata")},
            overwrite=bool(body.get("overwrite")),
        )
        if body.get("ttl_seconds"):
            self.store.set_ttl(path, body["ttl_seconds"])
        return {"path": str(path), "size_bytes": size}

    def _peft_config(self, model: TrainingModel) -> dict[str, Any]:
        sites = model.base.sites
        targets = sites.target_modules(model.factors)
        return lora.peft_config(model.spec.rank, targets, model.base.source, transposed=sites.transposed)

    def load(self, model_id: str, path: str, *, optimizer: bool) -> Payload:
        """Replace a model's weights; Adam continues if `optimizer`, else starts anew."""
        model = self._model(model_id)
        tensors, adam, about = self.store.load(weights.CheckpointPath.parse(path))
        if self._of_checkpoint(about).base is not model.base and about["base_model"] in self.served:
            raise EngineRequestError(f"{path} is an adapter of {about['base_model']}, the model is one of {model.base.source}")
        if about["lora"]["rank"] != model.spec.rank:
            raise EngineRequestError(f"{path} has rank {about['lora']['rank']}, the model {model.spec.rank}; they must agree")
        if optimizer and adam is None:
            raise EngineRequestError(f"{path} holds no optimizer state; use a weights/ path, or load without the optimizer")
        model.load(lora.from_tensors(tensors, model.base.device), adam if optimizer else None, path)
        return {"path": path, "model_id": model_id}

    def create_from_state(self, session_id: str, model_seq_id: int, path: str, *, optimizer: bool, metadata: Any) -> Payload:
        _, _, about = self.store.load(weights.CheckpointPath.parse(path))
        base = self._of_checkpoint(about).base
        model_id = self._add_model(session_id, model_seq_id, base, LoraSpec(**about["lora"]), metadata)
        return self.load(model_id, path, optimizer=optimizer)

    # --- sampling ---------------------------------------------------------------------------------------------------

    def snapshot(self, model_id: str, sampling_seq_id: int) -> Payload:
        """Make the model's present weights a sampler, in memory."""
        model = self._model(model_id)
        session_id = model_id.split(":", 1)[0]
        snapshot = model.snapshot()
        served = self.served[model.base.source]
        sampler_id = self.add_sampler(session_id, sampling_seq_id, served, snapshot, None)
        return {"sampling_session_id": sampler_id}

    def load_sampler(self, base_model: str | None, model_path: str | None) -> tuple[ServedModel, Snapshot | None]:
        """Read the weights of a checkpoint for sampling; None stands for the base model's own.

        Any thread may call this. Raises EngineRequestError for a checkpoint that is not there, or
        does not fit.
        """
        if model_path is None:
            return self._served_model(base_model or ""), None
        tensors, _, about = self.store.load(weights.CheckpointPath.parse(model_path))
        served = self._of_checkpoint(about)
        factors = lora.from_tensors(tensors, served.base.device)
        served.base.sites.check(factors, model_path)
        return served, Snapshot(factors, LoraSpec(**about["lora"]).scale)

    def add_sampler(
        self,
        session_id: str,
        seq_id: int,
        served: ServedModel,
        snapshot: Snapshot | None,
        model_path: str | None,
    ) -> str:
        """Register weights for sampling and return the sampler's id."""
        session = self.sessions.get(session_id)
        if session is None:
            raise EngineRequestError(f"the session {session_id} has ended")
        sampler_id = f"{session_id}:sample:{seq_id}"
        if sampler_id not in self.samplers:  # the client re-sends a creation whose answer was lost
            session.samplers.append(sampler_id)
        self.samplers[sampler_id] = SamplerEntry(sampler_id, served, snapshot, model_path)
        unnamed = [self.samplers[one] for one in session.samplers if self._is_unnamed(one)]
        for entry in sorted(unnamed, key=lambda one: one.last_used)[:-SNAPSHOTS_PER_SESSION]:
            del self.samplers[entry.sampler_id]
            session.samplers.remove(entry.sampler_id)
        return sampler_id

    def _is_unnamed(self, sampler_id: str) -> bool:
        entry = self.samplers.get(sampler_id)
        return entry is not None and entry.snapshot is not None and entry.model_path is None

    # --- look-ups ---------------------------------------------------------------------------------------------------

    def _model(self, model_id: str) -> TrainingModel:
        if model_id not in self.models:
            raise EngineRequestError(f"there is no model {model_id} in this engine; its session may have ended")
        return self.models[model_id]

    def _served_model(self, name: str) -> ServedModel:
        if name not in self.served:
            raise EngineRequestError(f"this engine serves {', '.join(self.served)}, not {name!r}")
        return self.served[name]

    def _of_checkpoint(self, about: dict[str, Any]) -> ServedModel:
        # A model that was moved has another name than its checkpoints say; sizes are checked.
        return self.served.get(about.get("base_model", ""), self.main)

    def _forget_adapters(self) -> None:
        for served in self.served.values():
            served.base.sites.forget()
