"""Track a sampling request in progress, and each of its sequences."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from lachesis.engine.base_model.lora_layers import LoraAdapter
from lachesis.tinker_server.sample_messages import (
    PromptLogprobs,
    SampledSequence,
    SampleRequest,
    SampleResponse,
)


@dataclass(eq=False)
class SamplingJob:
    """Track one request; `done` is called once with its result, unless the request is cancelled."""

    request: SampleRequest
    snapshot: LoraAdapter | None
    on_done: Callable[[SampleResponse | Exception], None]
    unstarted_indices: deque[int] = field(init=False)
    """The samples that have not begun, or begin again."""
    prompt_logprobs: PromptLogprobs | None = None
    sequences: dict[int, SampledSequence] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.unstarted_indices = deque(range(self.request.num_samples))

    def finish(self, index: int, sequence: SampledSequence) -> None:
        """Store a finished sequence, and report the result once all sequences are finished."""
        self.sequences[index] = sequence
        if len(self.sequences) == self.request.num_samples:
            ordered = [
                self.sequences[sample_index] for sample_index in range(self.request.num_samples)
            ]
            self.on_done(SampleResponse(ordered, self.prompt_logprobs or PromptLogprobs()))


@dataclass(eq=False)
class BatchRow:
    """Track one sequence, which generates at most `max_new_tokens` tokens."""

    job: SamplingJob
    index: int
    max_new_tokens: int
    rng: np.random.Generator
    num_drawn: int = 0
    tokens: list[int] = field(default_factory=list)
    """Its tokens, kept on the host only if stop strings are searched."""
    top_logprobs: list[tuple[Sequence[int], Sequence[float]]] = field(default_factory=list)

    @property
    def max_length(self) -> int:
        """Return the maximum length of prompt and answer."""
        return len(self.job.request.prompt) + self.max_new_tokens

    def stack_top_logprobs(self) -> tuple[np.ndarray, np.ndarray] | None:
        """Return ids and log-probabilities of the most likely tokens, if they were recorded."""
        if not self.top_logprobs:
            return None
        ids, values = zip(*self.top_logprobs, strict=True)
        return np.array(ids, np.int32), np.array(values, np.float32)
