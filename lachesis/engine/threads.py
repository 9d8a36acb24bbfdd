"""How many threads PyTorch should use for this model on this machine: measured, because more of them make a small model
slower."""

from __future__ import annotations

import logging
import time

import torch

from lachesis.engine.model import BaseModel

log = logging.getLogger(__name__)
ROWS, TOKENS, REPEATS = 8, 16, 4
WORTH = 0.95
"""More threads are taken when they need at most this share of the time."""


def choose(base: BaseModel) -> int:
    """Time short passes with 1, 2, 4 … threads, at most as many as PyTorch would use by itself ($OMP_NUM_THREADS, else the
    cores), set the number that pays, and return it. On a GPU nothing is measured."""
    most: int = torch.get_num_threads()
    if base.device.type != "cpu" or most == 1:
        return most
    chosen, best = 1, float("inf")
    count = 1
    while count <= most:
        torch.set_num_threads(count)
        took = _measure(base)
        if took <= WORTH * best:
            chosen, best = count, took
        count *= 2
    torch.set_num_threads(chosen)
    log.info("%d of at most %d threads: %d sequences of %d tokens take %.1f ms", chosen, most, ROWS, TOKENS, 1000 * best)
    return chosen


@torch.inference_mode()
def _measure(base: BaseModel) -> float:
    """Seconds of one pass, the fastest of some: other work on the machine makes the others slower."""
    ids = torch.arange(ROWS * TOKENS).view(ROWS, TOKENS) % base.vocabulary
    times = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        base.logits(base.states(ids))
        times.append(time.perf_counter() - started)
    return min(times)
