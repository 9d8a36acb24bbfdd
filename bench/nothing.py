"""The embedded engine with its model left out: every answer is there at once. What a client
measures at it is the cost of the protocol, on both sides: no server of whatever speed can give the
SDK more.

python bench/nothing.py --model FOLDER --port N --store DIR      as `python -m lachesis.engine`
"""

from __future__ import annotations

import sys
from collections.abc import Generator
from typing import Any

import numpy as np

from lachesis.engine import __main__ as engine
from lachesis.engine.sample_request import SampledSequence, SampleResponse
from lachesis.engine.sampler import Sampler, SamplingJob
from lachesis.engine.training import TrainingModel


def at_once(self: Sampler, job: SamplingJob) -> None:
    count = job.request.max_tokens or 1
    sequences = [
        SampledSequence([0] * count, [-1.0] * count, has_stopped=False)
        for _ in range(job.request.num_samples)
    ]
    job.on_done(SampleResponse(sequences))


def no_passes(
    self: TrainingModel, data: list[Any], loss_fn: str, config: Any, *, forward_only: bool
) -> Generator[None, None, Any]:
    yield
    return [np.zeros(len(datum.tokens), np.float32) for datum in data], {"loss:sum": 0.0}


def no_step(self: TrainingModel, adam: dict[str, Any]) -> dict[str, float]:
    return {}


if __name__ == "__main__":
    Sampler.add, TrainingModel.forward_backward, TrainingModel.optim_step = (
        at_once,
        no_passes,
        no_step,
    )  # type: ignore[method-assign]
    sys.exit(engine.main())
