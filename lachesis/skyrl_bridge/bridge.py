"""Keep the sessions, adapters, samplers and checkpoints of the bridge's clients.

The engine behind it knows adapters and checkpoints by names of its own. Clients never see them: a
checkpoint is a folder of the run, as those of the embedded engine, so a later bridge before a newly
started engine finds everything again.
"""

import asyncio
import logging
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from lachesis.base.errors import EngineRequestError
from lachesis.skyrl_bridge.adapter_transfer import AdapterStates
from lachesis.skyrl_bridge.client import UpstreamClient
from lachesis.skyrl_bridge.loss_sums import GradientLedger, Semantics, find_grad_norm, make_pass
from lachesis.skyrl_bridge.sample_forwarding import BridgedSampler, BridgeWorker, SamplingWeights
from lachesis.tinker_server.checkpoint_store import CheckpointPath, CheckpointStore
from lachesis.tinker_server.engine_interface import EngineSession, Metadata, SessionKeeper
from lachesis.tinker_server.futures import Payload
from lachesis.tinker_server.json_messages import (
    ADAM_DEFAULTS,
    describe_adapter,
    describe_base_model,
)
from lachesis.tinker_server.model_description import BridgedModel, LoraSpec
from lachesis.tinker_server.protobuf_messages import (
    ForwardBackwardRequest,
    decode_data,
    encode_forward_backward,
)

log = logging.getLogger(__name__)
# Unnamed sampler weights of a session that stay; the least recently used ones are dropped first.
MAX_SNAPSHOTS_PER_SESSION = 8


@dataclass
class BridgedAdapter:
    """Hold an adapter in training; `upstream_id` is its name at the engine."""

    upstream_id: str
    spec: LoraSpec
    ledger: GradientLedger


class BridgeEngine(SessionKeeper):
    """Hold the state behind the HTTP routes."""

    def __init__(
        self,
        model: BridgedModel,
        upstream: UpstreamClient,
        worker_key: str,
        states: AdapterStates,
        semantics: Semantics,
    ) -> None:
        super().__init__()
        self.model, self.upstream, self.states = model, upstream, states
        self.semantics, self._worker_key = semantics, worker_key
        self.store: CheckpointStore = states.store
        self.adapters: dict[str, BridgedAdapter] = {}
        self.samplers: dict[str, BridgedSampler] = {}

    def start_worker(self, loop: asyncio.AbstractEventLoop) -> BridgeWorker:
        """Start what runs the operations and the samples."""
        url = self.upstream.url.removesuffix("/api/v1/")
        return BridgeWorker(url, self._worker_key, loop)

    def describe_models(self) -> list[dict[str, Any]]:
        """Return the base model as the protocol describes it."""
        return [describe_base_model(self.model.name, self.model.context_length)]

    def describe_training_model(self, model_id: str) -> dict[str, Any] | None:
        """Return a model in training as the protocol describes it; None if there is none."""
        adapter = self.adapters.get(model_id)
        if adapter is None:
            return None
        return describe_adapter(
            model_id, self.model.name, adapter.spec.rank, self.model.architecture
        )

    # --- sessions

    def end_session(self, session_id: str) -> Payload:
        """Free the adapters of a session at the engine; its checkpoints stay."""
        session = self.sessions.pop(session_id, None)
        for model_id in session.model_ids if session else ():
            if adapter := self.adapters.pop(model_id, None):
                self.upstream.unload_model(adapter.upstream_id)
        for sampler_id in list(session.sampler_ids) if session else ():
            self._drop_sampler(sampler_id)
        return {}

    def unload_model(self, model_id: str) -> Payload:
        """Free the memory of one model of a session."""
        adapter = self._get_adapter(model_id)
        del self.adapters[model_id]
        self.remove_from_sessions(model_id)
        self.upstream.unload_model(adapter.upstream_id)
        return {"model_id": model_id}

    # --- training

    def create_model(
        self,
        session_id: str,
        model_seq_id: int,
        base_model: str,
        spec: LoraSpec,
        metadata: Metadata,
    ) -> Payload:
        """Create an adapter on the base model for training."""
        self._require_model(base_model)
        if not spec.train_attn or not spec.train_mlp:
            raise EngineRequestError(
                "train_attn and train_mlp are not offered over the bridge, whose engine adapts "
                "both; leave them out"
            )
        upstream_id = self.upstream.create_model(self.model.name, spec.rank, spec.seed)
        return self._register(session_id, model_seq_id, upstream_id, spec, metadata)

    def create_model_from_checkpoint(
        self,
        session_id: str,
        model_seq_id: int,
        path: str,
        *,
        with_optimizer: bool,
        metadata: Metadata,
    ) -> Payload:
        """Create a model with the weights of a checkpoint."""
        spec, upstream_id = self.states.load(
            CheckpointPath.parse(path), with_optimizer=with_optimizer
        )
        return self._register(session_id, model_seq_id, upstream_id, spec, metadata)

    def _register(
        self,
        session_id: str,
        model_seq_id: int,
        upstream_id: str,
        spec: LoraSpec,
        metadata: Metadata,
    ) -> Payload:
        """Register an adapter with the engine and return its id, even of an ended session."""
        session = self.sessions.get(session_id)
        if session is None:
            self.upstream.unload_model(upstream_id)
            raise EngineRequestError(f"the session {session_id} has ended")
        model_id = f"{session_id}:train:{model_seq_id}"
        self.adapters[model_id] = BridgedAdapter(upstream_id, spec, GradientLedger(self.semantics))
        session.model_ids.append(model_id)
        record = {
            "training_run_id": model_id,
            "base_model": self.model.name,
            "lora": spec.as_dict(),
            "user_metadata": {key: str(value) for key, value in (metadata or {}).items()},
            "last_request_time": datetime.now(UTC).isoformat(),
        }
        self.store.save_run(model_id, record)
        return {"model_id": model_id}

    def forward_backward(self, request: ForwardBackwardRequest) -> Payload:
        """Compute losses and gradients, translated to Tinker's sums over tokens."""
        adapter = self._get_adapter(request.model_id)
        new = make_pass(decode_data(request), request.loss_fn, request.loss_config, self.semantics)
        passes = [new] if request.forward_only else adapter.ledger.plan(new)
        for scaled in passes:
            result = self.upstream.run_pass(
                adapter.upstream_id,
                scaled.scale_data(self.semantics),
                scaled.loss_fn,
                scaled.loss_config,
                forward_only=request.forward_only,
            )
        if not request.forward_only:
            adapter.ledger.note(new)
        if result.outputs_D and all("elementwise_loss" in output for output in result.outputs_D):
            token_losses_D = [output["elementwise_loss"] for output in result.outputs_D]
            loss_sum = new.compute_loss_sum(token_losses_D, self.semantics)
        else:
            loss_sum = result.metrics.get("loss:sum", float("nan"))
        logprobs_D = [output["logprobs"] for output in result.outputs_D]
        return encode_forward_backward(logprobs_D, {"loss:sum": loss_sum})

    def optim_step(self, model_id: str, adam_params: dict[str, Any]) -> Payload:
        """Take an optimizer step with the gradients collected so far."""
        adapter = self._get_adapter(model_id)
        values = {name: float(value) for name, value in adam_params.items() if value is not None}
        clip = values.get("grad_clip_norm", 0.0)
        if clip and not self.semantics.clips:
            raise EngineRequestError(
                f"grad_clip_norm is {clip:g}, which the engine ignores; allowed: 0"
            )
        unknown = sorted(set(values) - set(ADAM_DEFAULTS))
        if unknown:
            raise EngineRequestError(
                f"adam_params has {', '.join(unknown)}; allowed: {', '.join(ADAM_DEFAULTS)}"
            )
        params = {**ADAM_DEFAULTS, **values}
        if not clip:  # An engine may not know the field.
            del params["grad_clip_norm"]
        metrics = self.upstream.optim_step(adapter.upstream_id, params)
        adapter.ledger.clear()
        grad_norm = find_grad_norm(metrics)
        return {"metrics": {} if grad_norm is None else {"grad_norm": grad_norm}}

    # --- checkpoints

    def save_checkpoint(
        self, model_id: str, kind: str, name: str | None, options: dict[str, Any]
    ) -> Payload:
        """Write a checkpoint; those of kind `weights` continue with the optimizer's state."""
        adapter = self._get_adapter(model_id)
        path = CheckpointPath(model_id, kind, name or uuid.uuid4().hex[:8])
        record = {
            "lora": adapter.spec.as_dict(),
            "base_model": self.model.name,
            "user_metadata": options.get("user_metadata"),
        }
        size = self.states.save(
            adapter.upstream_id, path, record, overwrite=bool(options.get("overwrite"))
        )
        if options.get("ttl_seconds"):
            self.store.set_ttl(path, options["ttl_seconds"])
        return {"path": str(path), "size_bytes": size}

    def load_checkpoint(self, model_id: str, path: str, *, with_optimizer: bool) -> Payload:
        """Replace the weights of a model by those of a checkpoint.

        An engine may load into a new adapter only, so the model gets one.
        """
        adapter = self._get_adapter(model_id)
        spec, upstream_id = self.states.load(
            CheckpointPath.parse(path), with_optimizer=with_optimizer
        )
        if spec.rank != adapter.spec.rank:
            self.upstream.unload_model(upstream_id)
            raise EngineRequestError(
                f"{path} has rank {spec.rank} and the model has rank {adapter.spec.rank}; they "
                "must be equal"
            )
        self.upstream.unload_model(adapter.upstream_id)
        self.adapters[model_id] = BridgedAdapter(upstream_id, spec, GradientLedger(self.semantics))
        return {"path": path, "model_id": model_id}

    # --- sampling

    def create_snapshot_sampler(self, model_id: str, sampling_seq_id: int) -> Payload:
        """Make a sampler from the current weights of a model.

        An engine may sample the newest weights for every client, so a copy of the adapter is
        sampled, which is never trained.
        """
        adapter = self._get_adapter(model_id)
        session_id = model_id.split(":", 1)[0]
        loaded = self.states.copy_for_sampling(adapter.upstream_id, adapter.spec)
        sampler_id = self.add_sampler(session_id, sampling_seq_id, loaded, None)
        return {"sampling_session_id": sampler_id}

    def load_sampler(self, base_model: str | None, model_path: str | None) -> SamplingWeights:
        """Prepare weights for sampling.

        Raises:
            EngineRequestError: The checkpoint does not exist.
        """
        if model_path is None:
            self._require_model(base_model or "")
            return SamplingWeights(self.upstream.create_sampler(base_model=self.model.name))
        return self.states.load_for_sampling(CheckpointPath.parse(model_path))

    def prepare_sampler(
        self, base_model: str | None, model_path: str | None
    ) -> Callable[[str, int], str]:
        """Prepare weights for sampling on any thread; return the function that registers them."""
        loaded = self.load_sampler(base_model, model_path)
        return lambda session_id, seq_id: self.add_sampler(session_id, seq_id, loaded, model_path)

    def add_sampler(
        self, session_id: str, seq_id: int, loaded: SamplingWeights, model_path: str | None
    ) -> str:
        """Register weights for sampling and return the id of the sampler."""
        session = self.sessions.get(session_id)
        if session is None:
            raise EngineRequestError(f"the session {session_id} has ended")
        sampler_id = f"{session_id}:sample:{seq_id}"
        if sampler_id in self.samplers:  # The client repeats a request whose answer was lost.
            self._drop_sampler(sampler_id)
        else:
            session.sampler_ids.append(sampler_id)
        self.samplers[sampler_id] = BridgedSampler(
            sampler_id=sampler_id,
            limits=self.model,
            weights=loaded,
            model_path=model_path,
            last_used=time.monotonic(),
        )
        self._drop_old_snapshots(session)
        return sampler_id

    def _drop_old_snapshots(self, session: EngineSession) -> None:
        """Free the adapters of unnamed weights that nobody has sampled for long."""
        unnamed = [
            sampler
            for sampler_id in session.sampler_ids
            if (sampler := self.samplers[sampler_id]).weights.upstream_model
            and not sampler.model_path
        ]
        unnamed.sort(key=lambda sampler: sampler.last_used)
        for sampler in unnamed[:-MAX_SNAPSHOTS_PER_SESSION]:
            if not sampler.num_in_flight:
                session.sampler_ids.remove(sampler.sampler_id)
                self._drop_sampler(sampler.sampler_id)

    def _drop_sampler(self, sampler_id: str) -> None:
        sampler = self.samplers.pop(sampler_id, None)
        if sampler is not None:
            self.states.release(sampler.weights)

    # --- look-ups

    def _get_adapter(self, model_id: str) -> BridgedAdapter:
        if model_id not in self.adapters:
            raise EngineRequestError(
                f"there is no model {model_id} behind this bridge; its session may have ended"
            )
        return self.adapters[model_id]

    def _require_model(self, name: str) -> None:
        if name != self.model.name:
            raise EngineRequestError(f"this engine serves {self.model.name}, not {name!r}")
