"""Define what an engine offers to the HTTP routes, which several engines share."""

import asyncio
import time
import uuid
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future as ConcurrentFuture
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from lachesis.tinker_server.checkpoint_store import CheckpointStore
from lachesis.tinker_server.futures import Payload, RequestFuture
from lachesis.tinker_server.json_messages import ModelLimits
from lachesis.tinker_server.model_description import LoraSpec
from lachesis.tinker_server.protobuf_messages import ForwardBackwardRequest
from lachesis.tinker_server.sample_messages import SampleRequest

OperationCall = Callable[[], Payload | Generator[None, None, Payload]]
Result = TypeVar("Result")
# What a client tells about itself or about a model.
Metadata = Mapping[str, object] | None


class ServedSession(Protocol):
    """Hold the state of one client process."""

    @property
    def metadata(self) -> dict[str, str]:
        """Return the metadata that the client has sent with its session."""

    @property
    def model_ids(self) -> list[str]:
        """Return the ids of its models in training."""

    @property
    def sampler_ids(self) -> list[str]:
        """Return the ids of its samplers."""


class ServedSampler(Protocol):
    """Hold frozen weights for sampling."""

    last_used: float

    @property
    def model_path(self) -> str | None:
        """Return the path of its checkpoint; None for a base model and for unnamed weights."""

    @property
    def model_name(self) -> str:
        """Return the name of the base model."""

    @property
    def limits(self) -> ModelLimits:
        """Return the limits that requests are checked against."""


class Worker(Protocol):
    """Run the operations and the sampling requests of an engine."""

    def submit(self, future: RequestFuture, call: OperationCall) -> None:
        """Queue an operation; its result or its error becomes that of the future."""

    def submit_sample(self, future: RequestFuture, sampler: Any, request: SampleRequest) -> None:
        """Queue a checked sampling request with one of the engine's samplers."""

    def call_soon(self, call: Callable[[], Result]) -> ConcurrentFuture[Result]:
        """Run a short call before all operations that wait, and return its future."""

    def cancel_queued_operation(self, future: RequestFuture) -> bool:
        """Remove the operation of a future from the queue; False if it has begun."""

    def make_error(self, error: Exception) -> Payload:
        """Return an error in the protocol's format."""

    @property
    def num_waiting(self) -> int:
        """Return the number of sampling requests that have not begun."""

    def stop(self) -> None:
        """End the work in progress; waiting requests are dropped."""


class TinkerEngine(Protocol):
    """Hold the state behind the HTTP routes.

    An operation on a model may be a generator, which lets other work run in between. Each raises
    EngineRequestError for what it cannot do.
    """

    @property
    def store(self) -> CheckpointStore:
        """Return the checkpoints."""

    @property
    def sessions(self) -> Mapping[str, ServedSession]:
        """Return the sessions by id."""

    @property
    def samplers(self) -> Mapping[str, ServedSampler]:
        """Return the samplers by id."""

    def start_worker(self, loop: asyncio.AbstractEventLoop) -> Worker:
        """Start what runs the operations; futures are finished on this event loop."""

    def describe_models(self) -> list[dict[str, Any]]:
        """Return the base models as the protocol describes them."""

    def describe_training_model(self, model_id: str) -> dict[str, Any] | None:
        """Return a model in training as the protocol describes it; None if there is none."""

    def create_session(self, metadata: dict[str, Any] | None) -> str:
        """Start a session and return its id."""

    def record_heartbeat(self, session_id: str) -> bool:
        """Note a heartbeat and return whether the session exists."""

    def find_expired_sessions(self) -> list[str]:
        """Return the ids of sessions whose last heartbeat is too old."""

    def end_session(self, session_id: str) -> Payload:
        """Free the memory of a session; its checkpoints stay."""

    def create_model(
        self,
        session_id: str,
        model_seq_id: int,
        base_model: str,
        spec: LoraSpec,
        metadata: Metadata,
    ) -> Payload:
        """Create an adapter on a base model for training."""

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

    def unload_model(self, model_id: str) -> Payload:
        """Free the memory of one model of a session."""

    def forward_backward(
        self, request: ForwardBackwardRequest
    ) -> Payload | Generator[None, None, Payload]:
        """Compute losses and gradients."""

    def optim_step(self, model_id: str, adam_params: dict[str, Any]) -> Payload:
        """Take an optimizer step with the gradients collected so far."""

    def save_checkpoint(
        self, model_id: str, kind: str, name: str | None, options: dict[str, Any]
    ) -> Payload:
        """Write a checkpoint."""

    def load_checkpoint(self, model_id: str, path: str, *, with_optimizer: bool) -> Payload:
        """Replace the weights of a model."""

    def create_snapshot_sampler(self, model_id: str, sampling_seq_id: int) -> Payload:
        """Make a sampler from the current weights of a model."""

    def prepare_sampler(
        self, base_model: str | None, model_path: str | None
    ) -> Callable[[str, int], str]:
        """Prepare weights for sampling, on any thread.

        Returns:
            What registers them for a session and a sequence id, and returns the sampler's id.
        """


# A session without a heartbeat (every 10 s) for this long is ended, and its memory is freed.
SESSION_EXPIRY_S = 900.0


@dataclass
class EngineSession:
    """Hold the state of one client process."""

    session_id: str
    metadata: dict[str, str]
    last_seen: float = field(default_factory=time.monotonic)
    model_ids: list[str] = field(default_factory=list)
    sampler_ids: list[str] = field(default_factory=list)


class SessionKeeper:
    """Start sessions, and find those whose clients are gone."""

    def __init__(self) -> None:
        self.sessions: dict[str, EngineSession] = {}

    def create_session(self, metadata: dict[str, Any] | None) -> str:
        """Start a session and return its id."""
        session = EngineSession(
            uuid.uuid4().hex[:12], {key: str(value) for key, value in (metadata or {}).items()}
        )
        self.sessions[session.session_id] = session
        return session.session_id

    def record_heartbeat(self, session_id: str) -> bool:
        """Note a heartbeat and return whether the session exists."""
        session = self.sessions.get(session_id)
        if session:
            session.last_seen = time.monotonic()
        return session is not None

    def find_expired_sessions(self) -> list[str]:
        """Return the ids of sessions whose last heartbeat is too old."""
        horizon = time.monotonic() - SESSION_EXPIRY_S
        # A copy: another thread ends sessions while this runs.
        return [
            session.session_id
            for session in list(self.sessions.values())
            if session.last_seen < horizon
        ]

    def remove_from_sessions(self, model_id: str) -> None:
        """Note that a model in training is gone."""
        for session in list(self.sessions.values()):
            if model_id in session.model_ids:
                session.model_ids.remove(model_id)
