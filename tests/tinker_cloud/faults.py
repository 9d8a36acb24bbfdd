"""Make things go wrong at the rehearsal cloud: one class per misfortune.

A fault sees each call before it reaches the engine, and each answer before it reaches the client.
`calls` says which calls it meets, by the first part of their path; `count` how many of them, where
None means until it is lifted.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from tests.tinker_cloud.bill import parse_sample

if TYPE_CHECKING:
    from tests.tinker_cloud.proxy import RehearsalCloud

SUBMITS = (
    "create_model|forward_backward|optim_step|save_weights|save_weights_for_sampler|asample|"
    "load_weights|create_sampling_session"
)
NO_CREDIT = "Your organization has no remaining credit. Add funds in the Tinker console."
REVOKED = "Invalid or revoked API key."


@dataclass
class Call:
    """Hold one request of a client."""

    method: str
    path: str
    """The path after `/api/v1/`, or the whole path of a download."""
    body: bytes
    headers: dict[str, str]

    @property
    def name(self) -> str:
        return self.path.split("/")[0]

    def read_json(self) -> dict[str, Any]:
        content = json.loads(self.body or b"{}")
        assert isinstance(content, dict)
        return content


@dataclass
class Answer:
    """Hold what the client gets; `cut_at` is the share of the body after which the line breaks."""

    status: int
    body: bytes
    headers: dict[str, str]
    cut_at: float | None = None


def make_refusal(status: int, detail: str, **headers: str) -> Answer:
    """Return an answer as the service refuses with it."""
    body = json.dumps({"detail": detail}).encode()
    return Answer(status, body, {"content-type": "application/json", **headers})


@dataclass
class Fault:
    """Let every call pass; each kind of fault changes what it needs to."""

    kind: ClassVar[str]
    calls: str = ".*"
    count: int | None = None
    num_met: int = 0

    def meets(self, call: Call) -> bool:
        """Return whether this call is one of those that the fault is for."""
        is_over = self.count is not None and self.num_met >= self.count
        return not is_over and re.fullmatch(self.calls, call.name) is not None

    async def before(self, call: Call, cloud: RehearsalCloud) -> Answer | None:
        """Return what the client gets instead of the engine's answer, or None."""
        return None

    async def after(self, call: Call, answer: Answer, cloud: RehearsalCloud) -> Answer:
        """Return what the client gets of the engine's answer."""
        return answer


@dataclass
class Queued(Fault):
    """Sampling waits for capacity: every poll in the first seconds says to try again."""

    kind = "queued"
    calls: str = "retrieve_future"
    seconds: float = 3.0
    lasts_until: float | None = None

    async def before(self, call: Call, cloud: RehearsalCloud) -> Answer | None:
        if self.lasts_until is None:
            self.lasts_until = time.monotonic() + self.seconds
        if time.monotonic() > self.lasts_until:
            return None
        await asyncio.sleep(0.2)
        self.num_met += 1
        content = {
            "type": "try_again",
            "request_id": call.read_json()["request_id"],
            "queue_state": "paused_capacity",
            "queue_state_reason": "The service is short of capacity.",
        }
        return Answer(408, json.dumps(content).encode(), {"content-type": "application/json"})


@dataclass
class Refused(Fault):
    """Every call is refused with one status."""

    status: int = 500
    detail: str = "An internal error occurred."
    retry_after: float | None = None

    async def before(self, call: Call, cloud: RehearsalCloud) -> Answer | None:
        self.num_met += 1
        headers = {}
        if self.retry_after is not None:
            headers["retry-after"] = f"{self.retry_after:g}"
        return make_refusal(self.status, self.detail, **headers)


@dataclass
class Unpaid(Refused):
    """The account has no money left."""

    kind = "unpaid"
    calls: str = SUBMITS
    status: int = 402
    detail: str = NO_CREDIT


@dataclass
class Revoked(Refused):
    """The key was revoked."""

    kind = "revoked"
    status: int = 401
    detail: str = REVOKED


@dataclass
class RateLimit(Refused):
    """Some calls come too soon."""

    kind = "rate_limit"
    calls: str = SUBMITS
    count: int | None = 6
    status: int = 429
    detail: str = "Too many requests."


@dataclass
class ServerError(Refused):
    """Some calls meet a server that is broken."""

    kind = "server_error"
    calls: str = f"{SUBMITS}|retrieve_future"
    count: int | None = 6
    status: int = 503
    detail: str = "The service is unavailable."


@dataclass
class Cut(Fault):
    """The line breaks in the middle of the answer: what was asked for is done, and nobody knows."""

    kind = "cut"
    calls: str = f"{SUBMITS}|retrieve_future"
    count: int | None = 4

    async def after(self, call: Call, answer: Answer, cloud: RehearsalCloud) -> Answer:
        self.num_met += 1
        answer.cut_at = 0.5
        return answer


@dataclass
class Lost(Fault):
    """The line breaks before the request has arrived."""

    kind = "lost"
    calls: str = f"{SUBMITS}|retrieve_future"
    count: int | None = 4

    async def before(self, call: Call, cloud: RehearsalCloud) -> Answer | None:
        self.num_met += 1
        return Answer(200, b"{}", {"content-type": "application/json"}, cut_at=0.0)


@dataclass
class SessionExpired(Fault):
    """The session of a client ends, with its model and its samplers; checkpoints stay."""

    kind = "session_expired"
    calls: str = "asample|forward_backward"
    count: int | None = 1

    async def before(self, call: Call, cloud: RehearsalCloud) -> Answer | None:
        self.num_met += 1
        await cloud.end_sessions()
        return None


@dataclass
class ModelRetired(Fault):
    """A model is no longer offered."""

    kind = "model_retired"
    calls: str = "get_server_capabilities|create_model|create_sampling_session"
    model: str = ""

    async def before(self, call: Call, cloud: RehearsalCloud) -> Answer | None:
        if call.name == "get_server_capabilities":
            return None
        if call.read_json().get("base_model") != self.model:
            return None
        self.num_met += 1
        return make_refusal(400, f"The base model {self.model} is not supported.")

    async def after(self, call: Call, answer: Answer, cloud: RehearsalCloud) -> Answer:
        if call.name != "get_server_capabilities":
            return answer
        content = json.loads(answer.body)
        content["supported_models"] = [
            model for model in content["supported_models"] if model["model_name"] != self.model
        ]
        answer.body = json.dumps(content).encode()
        return answer


def find_publication(call: Call) -> str | None:
    """Return the id of the sampling session that a call publishes, or None for other calls."""
    if call.name != "save_weights_for_sampler":
        return None
    content = call.read_json()
    sequence_id = content.get("sampling_session_seq_id")
    if sequence_id is None:
        return None
    return f"{content['model_id'].split(':')[0]}:sample:{sequence_id}"


def redirect_sample(call: Call, sampler_id: str, number: int) -> None:
    """Let another sampler answer, under a sequence id that none of its own requests has."""
    changed = {"sampling_session_id": sampler_id, "seq_id": 1_000_000 + number}
    call.body = json.dumps({**call.read_json(), **changed}).encode()


@dataclass
class StaleSampler(Fault):
    """A new sampler has the weights of the one before it."""

    kind = "stale_sampler"
    calls: str = "asample|save_weights_for_sampler"
    newest: str | None = None
    previous: str | None = None

    async def before(self, call: Call, cloud: RehearsalCloud) -> Answer | None:
        content = call.read_json()
        if published := find_publication(call):
            self.previous, self.newest = self.newest, published
        elif content.get("sampling_session_id") == self.newest and self.previous:
            self.num_met += 1
            redirect_sample(call, self.previous, self.num_met)
        return None


@dataclass
class Bfloat16(Fault):
    """Log-probabilities of samples are rounded as by a server that samples in bfloat16."""

    kind = "bfloat16"
    calls: str = "retrieve_future"

    async def after(self, call: Call, answer: Answer, cloud: RehearsalCloud) -> Answer:
        return _change_logprobs(self, answer, round_to_bfloat16)


@dataclass
class OrderNoise(Fault):
    """Log-probabilities depend on what else was computed: the same text differs from time to
    time.
    """

    kind = "order_noise"
    calls: str = "retrieve_future"
    scale: float = 0.01
    seed: int = 0

    def __post_init__(self) -> None:
        self._rng = np.random.default_rng(self.seed)

    async def after(self, call: Call, answer: Answer, cloud: RehearsalCloud) -> Answer:
        def add_noise(values: np.ndarray) -> np.ndarray:
            noise = self._rng.normal(0.0, self.scale, values.shape).astype(np.float32)
            return np.minimum(values + noise, 0.0)

        return _change_logprobs(self, answer, add_noise)


@dataclass
class TimeToLive(Fault):
    """Checkpoints expire although nobody asked for it."""

    kind = "time_to_live"
    calls: str = "save_weights|save_weights_for_sampler"
    seconds: int = 3600

    async def before(self, call: Call, cloud: RehearsalCloud) -> Answer | None:
        content = call.read_json()
        if content.get("path") and not content.get("ttl_seconds"):
            self.num_met += 1
            call.body = json.dumps({**content, "ttl_seconds": self.seconds}).encode()
        return None


@dataclass
class BrokenDownload(Fault):
    """A file breaks off at 60 %."""

    kind = "broken_download"
    calls: str = "download"
    count: int | None = 3
    share: float = 0.6

    async def after(self, call: Call, answer: Answer, cloud: RehearsalCloud) -> Answer:
        self.num_met += 1
        answer.cut_at = self.share
        return answer


def round_to_bfloat16(values: np.ndarray) -> np.ndarray:
    """Return float32 values rounded to the nearest bfloat16."""
    bits = values.astype(np.float32).view(np.uint32)
    rounded = bits + 0x7FFF + ((bits >> 16) & 1)
    return (rounded & 0xFFFF0000).astype(np.uint32).view(np.float32)


def read_sample(answer: Answer) -> Any:
    """Return the message of a sampling result, or None for any other answer."""
    is_protobuf = answer.headers.get("content-type") == "application/x-protobuf"
    if answer.status != 200 or not is_protobuf:
        return None
    try:
        message = parse_sample(answer.body)
    except Exception:  # It is the result of a training pass, which has another form.
        return None
    return message if message.sequences else None


def _change_logprobs(fault: Fault, answer: Answer, change: Any) -> Answer:
    """Change all log-probabilities of a sampling result; any other answer stays as it is."""
    message = read_sample(answer)
    if message is None:
        return answer
    fault.num_met += 1
    for sequence in message.sequences:
        values = np.frombuffer(sequence.logprobs, "<f4")
        sequence.logprobs = change(values).astype("<f4").tobytes()
    if message.HasField("prompt_logprobs"):
        values = np.frombuffer(message.prompt_logprobs, "<f4")
        message.prompt_logprobs = change(values).astype("<f4").tobytes()
    answer.body = message.SerializeToString()
    return answer


def make_fault(content: dict[str, Any]) -> Fault:
    """Return the fault that `{"kind": …, OPTION: VALUE}` describes."""
    kinds = {kind.kind: kind for kind in (*Fault.__subclasses__(), *Refused.__subclasses__())
             if hasattr(kind, "kind")}  # fmt: skip
    fault_class = kinds[content["kind"]]
    options = {name: value for name, value in content.items() if name != "kind"}
    unknown = options.keys() - {one.name for one in fields(fault_class)}
    assert not unknown, f"{fault_class.kind} has no option {', '.join(unknown)}"
    return fault_class(**options)
