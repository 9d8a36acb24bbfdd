"""A request for samples under way, and each of its sequences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from lachesis.engine.lora import Snapshot
from lachesis.engine.sample_request import Continuation, PromptAnswers, Sampled, SampleRequest


@dataclass(eq=False)
class Job:
    """A request under way. `done` is called once, with what came of it, unless it is cancelled."""

    request: SampleRequest
    snapshot: Snapshot | None
    done: Callable[[Sampled | Exception], None]
    entered: int = 0
    """Of its samples, those that have begun."""
    answers: PromptAnswers | None = None
    sequences: dict[int, Continuation] = field(default_factory=dict)

    def finish(self, index: int, sequence: Continuation) -> None:
        self.sequences[index] = sequence
        if len(self.sequences) == self.request.num_samples:
            ordered = [self.sequences[one] for one in range(self.request.num_samples)]
            self.done(Sampled(ordered, self.answers or PromptAnswers()))


@dataclass(eq=False)
class Row:
    """One sequence. `limit` is the most that it may generate."""

    job: Job
    index: int
    limit: int
    random: np.random.Generator
    drawn: int = 0
    text: list[int] = field(default_factory=list)
    """Its tokens, where stop strings are looked for."""
    likeliest: list[tuple[Sequence[int], Sequence[float]]] = field(default_factory=list)

    @property
    def length(self) -> int:
        return len(self.job.request.prompt) + self.limit
