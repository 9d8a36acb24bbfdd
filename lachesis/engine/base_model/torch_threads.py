"""Measure how many threads PyTorch should use, because too many make a small model slower."""

import logging
import time

import torch

from lachesis.engine.base_model.forward_pass import BaseLanguageModel

log = logging.getLogger(__name__)
ROWS, TOKENS, REPEATS = 8, 16, 4
# A larger number of threads is used if it takes at most this share of the time.
MAX_TIME_SHARE = 0.95


def tune_num_threads(base: BaseLanguageModel) -> int:
    """Find the fastest number of threads for short passes, set it and return it.

    It tries 1, 2, 4 … threads, up to the number that PyTorch would use ($OMP_NUM_THREADS, else the
    number of cores). On a GPU nothing is measured.
    """
    max_threads: int = torch.get_num_threads()
    if base.device.type != "cpu" or max_threads == 1:
        return max_threads
    best_count, best_time_s = 1, float("inf")
    num_threads = 1
    while num_threads <= max_threads:
        torch.set_num_threads(num_threads)
        time_s = _measure_pass_s(base)
        if time_s <= MAX_TIME_SHARE * best_time_s:
            best_count, best_time_s = num_threads, time_s
        num_threads *= 2
    torch.set_num_threads(best_count)
    log.info(
        "%d of at most %d threads: %d sequences of %d tokens take %.1f ms",
        best_count,
        max_threads,
        ROWS,
        TOKENS,
        1000 * best_time_s,
    )
    return best_count


@torch.inference_mode()
def _measure_pass_s(base: BaseLanguageModel) -> float:
    """Return the seconds of the fastest of several passes, which others slowed least."""
    ids = torch.arange(ROWS * TOKENS).view(ROWS, TOKENS) % base.vocab_size
    times = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        base.compute_logits(base.compute_states(ids))
        times.append(time.perf_counter() - started)
    return min(times)
