"""Hold the state of the engine: sessions, models in training, samplers and checkpoints.

Methods that run on the model thread return the JSON or protobuf result of a request. One that takes
long is a generator, which lets other work run in between.
"""

import asyncio
import uuid
from collections.abc import Callable, Generator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from lachesis.base.errors import EngineRequestError
from lachesis.engine.adapter_training import TrainingModel
from lachesis.engine.base_model import adapter_files
from lachesis.engine.base_model.forward_pass import BaseLanguageModel
from lachesis.engine.base_model.load import LoadSettings
from lachesis.engine.base_model.lora_layers import (
    LoraAdapter,
    from_tensors,
    make_peft_config,
    to_tensors,
)
from lachesis.engine.model_thread import ModelThread, SamplerEntry, ServedModel
from lachesis.engine.sampling.sampler import Sampler
from lachesis.tinker_server import protobuf_messages
from lachesis.tinker_server.checkpoint_store import CheckpointPath
from lachesis.tinker_server.engine_interface import Metadata, SessionKeeper
from lachesis.tinker_server.futures import Payload
from lachesis.tinker_server.json_messages import describe_adapter, describe_base_model
from lachesis.tinker_server.model_description import LoraSpec

# A file of this name in the store makes updates change nothing; tests of the monitor use it.
FREEZE_FILE_NAME = "freeze-weights"
# Maximum number of unnamed sampler weights per session; the least recently used are dropped first.
MAX_SNAPSHOTS_PER_SESSION = 16


class Engine(SessionKeeper):
    """Hold the state behind the HTTP routes."""

    def __init__(
        self,
        model: str,
        store_root: Path,
        *,
        extra_models: Sequence[str] = (),
        seed: int | None = None,
        settings: LoadSettings | None = None,
    ) -> None:
        """Load the models and keep all of them in memory.

        Args:
            model: A folder or a name on the Hub. It also serves checkpoints that name no model of
                this engine.
            store_root: The folder of the checkpoints.
            extra_models: More models that can be sampled and trained, such as a teacher.
            seed: The seed of sampling requests without a seed.
            settings: How the models are loaded.

        Raises:
            ModelNotFoundError: A model cannot be loaded.
            InsufficientMemoryError: A model does not fit into the memory of the device.
            UnsupportedModelError: A model cannot be served correctly.
        """
        super().__init__()
        self.served_models: dict[str, ServedModel] = {}
        for name in dict.fromkeys([model, *extra_models]):
            base = BaseLanguageModel(name, settings)
            self.served_models[name] = ServedModel(base, Sampler(base, seed))
        self.default_model = self.served_models[model]
        self.store = adapter_files.WeightsStore(store_root)
        self.models: dict[str, TrainingModel] = {}
        self.samplers: dict[str, SamplerEntry] = {}

    def start_worker(self, loop: asyncio.AbstractEventLoop) -> ModelThread:
        """Start the thread that runs the operations and the samplers."""
        samplers = [served_model.sampler for served_model in self.served_models.values()]
        return ModelThread(samplers, loop)

    def describe_models(self) -> list[dict[str, Any]]:
        """Return the base models as the protocol describes them."""
        return [
            describe_base_model(name, served_model.base.context_length)
            for name, served_model in self.served_models.items()
        ]

    # --- sessions

    def end_session(self, session_id: str) -> Payload:
        """Free the memory of a session; its checkpoints stay."""
        session = self.sessions.pop(session_id, None)
        for model_id in session.model_ids if session else ():
            self.models.pop(model_id, None)
        for sampler_id in session.sampler_ids if session else ():
            self.samplers.pop(sampler_id, None)
        self._clear_active_adapters()
        return {}

    def unload_model(self, model_id: str) -> Payload:
        """Free the memory of one model of a session."""
        self._get_model(model_id)
        del self.models[model_id]
        self.remove_from_sessions(model_id)
        self._clear_active_adapters()
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
        """Create an adapter on a base model for training."""
        base = self._get_served_model(base_model).base
        return {"model_id": self._add_model(session_id, model_seq_id, base, spec, metadata)}

    def _add_model(
        self,
        session_id: str,
        model_seq_id: int,
        base: BaseLanguageModel,
        spec: LoraSpec,
        metadata: Metadata,
    ) -> str:
        """Add a model to train and return its id, the same for a repeated request."""
        model_id = f"{session_id}:train:{model_seq_id}"
        # If the response was lost, the client repeats the request for an existing model.
        if model_id not in self.models:
            if session_id not in self.sessions:
                raise EngineRequestError(f"the session {session_id} has ended")
            self.models[model_id] = TrainingModel(base, spec)
            self.sessions[session_id].model_ids.append(model_id)
            record = {
                "training_run_id": model_id,
                "base_model": base.source,
                "lora": spec.as_dict(),
            }
            record["user_metadata"] = {key: str(value) for key, value in (metadata or {}).items()}
            self.store.save_run(
                model_id, {**record, "last_request_time": datetime.now(UTC).isoformat()}
            )
        return model_id

    def describe_training_model(self, model_id: str) -> dict[str, Any] | None:
        """Return a model in training as the protocol describes it; None if there is none."""
        model = self.models.get(model_id)
        if model is None:
            return None
        architecture = model.base.module.config.model_type
        return describe_adapter(model_id, model.base.source, model.spec.rank, architecture)

    def forward_backward(
        self, request: protobuf_messages.ForwardBackwardRequest
    ) -> Generator[None, None, Payload]:
        """Compute losses and gradients; yield between the passes of one request."""
        model = self._get_model(request.model_id)
        data = protobuf_messages.decode_data(request)
        logprobs_D, metrics = yield from model.forward_backward(
            data, request.loss_fn, request.loss_config, forward_only=request.forward_only
        )
        return protobuf_messages.encode_forward_backward(logprobs_D, metrics)

    def optim_step(self, model_id: str, adam_params: dict[str, Any]) -> Payload:
        """Take an optimizer step with the gradients collected so far."""
        is_frozen = (self.store.root / FREEZE_FILE_NAME).exists()
        return {
            "metrics": self._get_model(model_id).optim_step(
                {**adam_params, "learning_rate": 0.0} if is_frozen else adam_params
            )
        }

    # --- checkpoints

    def save_checkpoint(
        self, model_id: str, kind: str, name: str | None, options: dict[str, Any]
    ) -> Payload:
        """Write a checkpoint; those of kind `weights` include Adam's state."""
        model = self._get_model(model_id)
        path = CheckpointPath(model_id, kind, name or uuid.uuid4().hex[:8])
        size = self.store.save(
            path,
            tensors=to_tensors(model.factors),
            adapter_config=self._make_peft_config(model),
            optimizer=model.copy_optimizer_state() if kind == "weights" else None,
            checkpoint_record={
                "lora": model.spec.as_dict(),
                "base_model": model.base.source,
                "user_metadata": options.get("user_metadata"),
            },
            overwrite=bool(options.get("overwrite")),
        )
        if options.get("ttl_seconds"):
            self.store.set_ttl(path, options["ttl_seconds"])
        return {"path": str(path), "size_bytes": size}

    def _make_peft_config(self, model: TrainingModel) -> dict[str, Any]:
        lora_layers = model.base.lora_layers
        target_modules = lora_layers.find_target_modules(model.factors)
        return make_peft_config(
            model.spec.rank, target_modules, model.base.source, transposed=lora_layers.transposed
        )

    def load_checkpoint(self, model_id: str, path: str, *, with_optimizer: bool) -> Payload:
        """Replace a model's weights; Adam continues if `with_optimizer`, else starts again."""
        model = self._get_model(model_id)
        tensors, optimizer_state, checkpoint_record = self.store.load(CheckpointPath.parse(path))
        if (
            self._find_checkpoint_model(checkpoint_record).base is not model.base
            and checkpoint_record["base_model"] in self.served_models
        ):
            raise EngineRequestError(
                f"{path} is an adapter of {checkpoint_record['base_model']}, but the model is one "
                f"of {model.base.source}"
            )
        if checkpoint_record["lora"]["rank"] != model.spec.rank:
            raise EngineRequestError(
                f"{path} has rank {checkpoint_record['lora']['rank']} and the model has rank "
                f"{model.spec.rank}; they must be equal"
            )
        if with_optimizer and optimizer_state is None:
            raise EngineRequestError(
                f"{path} has no optimizer state; use a weights/ path, or load without the optimizer"
            )
        model.load(
            from_tensors(tensors, model.base.device),
            optimizer_state if with_optimizer else None,
            path,
        )
        return {"path": path, "model_id": model_id}

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
        _, _, checkpoint_record = self.store.load(CheckpointPath.parse(path))
        base = self._find_checkpoint_model(checkpoint_record).base
        model_id = self._add_model(
            session_id, model_seq_id, base, LoraSpec(**checkpoint_record["lora"]), metadata
        )
        return self.load_checkpoint(model_id, path, with_optimizer=with_optimizer)

    # --- sampling

    def create_snapshot_sampler(self, model_id: str, sampling_seq_id: int) -> Payload:
        """Make a sampler from a model's current weights, in memory."""
        model = self._get_model(model_id)
        session_id = model_id.split(":", 1)[0]
        snapshot = model.snapshot()
        served_model = self.served_models[model.base.source]
        sampler_id = self.add_sampler(session_id, sampling_seq_id, (served_model, snapshot), None)
        return {"sampling_session_id": sampler_id}

    def load_sampler(
        self, base_model: str | None, model_path: str | None
    ) -> tuple[ServedModel, LoraAdapter | None]:
        """Read the weights of a checkpoint for sampling; None stands for the base model's own.

        Any thread may call this.

        Raises:
            EngineRequestError: The checkpoint does not exist or does not fit.
        """
        if model_path is None:
            return self._get_served_model(base_model or ""), None
        tensors, _, checkpoint_record = self.store.load(CheckpointPath.parse(model_path))
        served_model = self._find_checkpoint_model(checkpoint_record)
        base = served_model.base
        factors = from_tensors(tensors, base.device, base.module.dtype)
        base.lora_layers.check_factors(factors, model_path)
        return served_model, LoraAdapter(factors, LoraSpec(**checkpoint_record["lora"]).scale)

    def prepare_sampler(
        self, base_model: str | None, model_path: str | None
    ) -> Callable[[str, int], str]:
        """Prepare weights for sampling on any thread; return the function that registers them."""
        loaded = self.load_sampler(base_model, model_path)
        return lambda session_id, seq_id: self.add_sampler(session_id, seq_id, loaded, model_path)

    def add_sampler(
        self,
        session_id: str,
        seq_id: int,
        loaded: tuple[ServedModel, LoraAdapter | None],
        model_path: str | None,
    ) -> str:
        """Register weights for sampling and return the sampler's id."""
        session = self.sessions.get(session_id)
        if session is None:
            raise EngineRequestError(f"the session {session_id} has ended")
        sampler_id = f"{session_id}:sample:{seq_id}"
        # If the response was lost, the client repeats the request for an existing sampler.
        if sampler_id not in self.samplers:
            session.sampler_ids.append(sampler_id)
        self.samplers[sampler_id] = SamplerEntry(sampler_id, *loaded, model_path)
        unnamed_entries = [
            self.samplers[registered_id]
            for registered_id in session.sampler_ids
            if self._is_unnamed(registered_id)
        ]
        for entry in sorted(unnamed_entries, key=lambda candidate: candidate.last_used)[
            :-MAX_SNAPSHOTS_PER_SESSION
        ]:
            del self.samplers[entry.sampler_id]
            session.sampler_ids.remove(entry.sampler_id)
        return sampler_id

    def _is_unnamed(self, sampler_id: str) -> bool:
        entry = self.samplers.get(sampler_id)
        return entry is not None and entry.snapshot is not None and entry.model_path is None

    # --- look-ups

    def _get_model(self, model_id: str) -> TrainingModel:
        if model_id not in self.models:
            raise EngineRequestError(
                f"there is no model {model_id} in this engine; its session may have ended"
            )
        return self.models[model_id]

    def _get_served_model(self, name: str) -> ServedModel:
        if name not in self.served_models:
            raise EngineRequestError(
                f"this engine serves {', '.join(self.served_models)}, not {name!r}"
            )
        return self.served_models[name]

    def _find_checkpoint_model(self, checkpoint_record: dict[str, Any]) -> ServedModel:
        # A model that was moved has another name than in its checkpoints; the sizes are checked.
        return self.served_models.get(checkpoint_record.get("base_model", ""), self.default_model)

    def _clear_active_adapters(self) -> None:
        for served_model in self.served_models.values():
            served_model.base.lora_layers.clear_adapters()
