"""Serve the embedded engine without computing anything, so that every answer is ready at once.

A client that is timed against it measures the cost of the protocol on both sides, which bounds the
speed of any server. The options are those of `python -m lachesis.engine`:

    python bench/programs/engine_without_compute.py --model FOLDER --port N --store DIR
"""

import sys
from collections.abc import Generator
from typing import Any

import numpy as np

from lachesis.engine import __main__ as engine
from lachesis.engine.adapter_training import TrainingModel
from lachesis.engine.sampling.sampler import Sampler, SamplingJob
from lachesis.tinker_server.sample_messages import SampledSequence, SampleResponse


def sample_at_once(self: Sampler, job: SamplingJob) -> None:
    """Answer a request with zeros of full length."""
    count = job.request.max_tokens or 1
    sequences = [
        SampledSequence([0] * count, [-1.0] * count, has_stopped=False)
        for _ in range(job.request.num_samples)
    ]
    job.on_done(SampleResponse(sequences))


def compute_nothing(
    self: TrainingModel, data: list[Any], loss_fn: str, config: Any, *, forward_only: bool
) -> Generator[None, None, Any]:
    """Return log-probabilities of zero without a pass through the model."""
    yield
    return [np.zeros(len(datum.tokens), np.float32) for datum in data], {"loss:sum": 0.0}


def skip_update(self: TrainingModel, adam: dict[str, Any]) -> dict[str, float]:
    """Return no metrics, and leave the weights as they are."""
    return {}


if __name__ == "__main__":
    Sampler.add, TrainingModel.forward_backward, TrainingModel.optim_step = (
        sample_at_once,
        compute_nothing,
        skip_update,
    )  # type: ignore[method-assign]
    sys.exit(engine.main())
