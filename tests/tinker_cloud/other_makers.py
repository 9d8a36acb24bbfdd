"""Let the rehearsal cloud behave as servers of other makers do: they mean something else by a
request, and no request fails.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tests.tinker_cloud.faults import (
    Answer,
    Call,
    Fault,
    find_publication,
    read_sample,
    redirect_sample,
)

if TYPE_CHECKING:
    from tests.tinker_cloud.proxy import RehearsalCloud


@dataclass
class ShortLogprobs(Fault):
    """The first token of a text has no log-probability, not even null."""

    kind = "short_logprobs"
    calls: str = "retrieve_future"

    async def after(self, call: Call, answer: Answer, cloud: RehearsalCloud) -> Answer:
        message = read_sample(answer)
        if message is not None and message.HasField("prompt_logprobs"):
            self.num_met += 1
            message.prompt_logprobs = message.prompt_logprobs[4:]
            answer.body = message.SerializeToString()
        return answer


@dataclass
class LiveSamplers(Fault):
    """Every sampling client has the weights that were published last."""

    kind = "live_samplers"
    calls: str = "asample|save_weights_for_sampler"
    publications: list[str] = field(default_factory=list)

    async def before(self, call: Call, cloud: RehearsalCloud) -> Answer | None:
        content = call.read_json()
        if published := find_publication(call):
            self.publications.append(published)
        elif content.get("sampling_session_id") in self.publications[:-1]:
            self.num_met += 1
            redirect_sample(call, self.publications[-1], self.num_met)
        return None


@dataclass
class IgnoredField(Fault):
    """A field of a request is not read."""

    field_path: str = ""

    async def before(self, call: Call, cloud: RehearsalCloud) -> Answer | None:
        content = call.read_json()
        *folders, name = self.field_path.split(".")
        inner: dict[str, Any] = content
        for folder in folders:
            inner = inner.get(folder) or {}
        if inner.pop(name, None) is not None:
            self.num_met += 1
            call.body = json.dumps(content).encode()
        return None


@dataclass
class NoClipping(IgnoredField):
    """The gradient is not clipped."""

    kind = "no_clipping"
    calls: str = "optim_step"
    field_path: str = "adam_params.grad_clip_norm"


@dataclass
class NoSeeds(IgnoredField):
    """Seeds are ignored."""

    kind = "no_seeds"
    calls: str = "asample"
    field_path: str = "sampling_params.seed"


@dataclass
class NoStopTokens(IgnoredField):
    """Answers go on after their stop token."""

    kind = "no_stop_tokens"
    calls: str = "asample"
    field_path: str = "sampling_params.stop"


OTHER_MAKERS: tuple[type[Fault], ...] = (
    ShortLogprobs, LiveSamplers, NoClipping, NoSeeds, NoStopTokens,
)  # fmt: skip
