"""Compute the log-probabilities of a request's prompt."""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from lachesis.base.arrays import Array
from lachesis.engine.sampling.token_choice import TokenChoiceSettings, choose_tokens
from lachesis.tinker_server.sample_messages import MISSING_LOGPROB, PromptLogprobs, SampleRequest

# Maximum number of prompt logits computed at a time, positions times vocabulary.
MAX_LOGITS_PER_CHUNK = 2**24


def compute_prompt_logprobs(
    request: SampleRequest,
    states: torch.Tensor,
    compute_logits: Callable[[torch.Tensor], torch.Tensor],
    uniforms: Array,
) -> PromptLogprobs:
    """Compute what a request asks about its prompt from the states (P, ·) of the prompt.

    `uniforms` (P - 1, alternatives) are the random numbers that choose the alternatives.
    """
    spec, num_tokens = request.prompt_logprobs_spec, len(request.prompt)
    result = PromptLogprobs()
    first_position = 1 if spec.last_n is None else num_tokens - spec.last_n
    if spec.include_logprobs:
        result.logprobs = np.full(num_tokens, np.nan, np.float32)
    if spec.num_top_logprobs:
        result.top_logprobs = (
            np.zeros((num_tokens, spec.num_top_logprobs), np.int32),
            np.full((num_tokens, spec.num_top_logprobs), MISSING_LOGPROB, np.float32),
        )
    if spec.target_ids is not None:
        result.target_logprobs = np.zeros(spec.target_ids.shape, np.float32)
    if spec.num_alternatives:
        shape = (num_tokens - 1, spec.num_alternatives)
        result.alternatives = (np.zeros(shape, np.int64), np.zeros(shape, np.float32))
    needs_all_positions = spec.target_ids is not None or spec.num_alternatives > 0
    start = 1 if needs_all_positions else first_position
    chunk_size = None
    while start < num_tokens:
        if chunk_size is None:
            chunk_size = max(1, MAX_LOGITS_PER_CHUNK // compute_logits(states[:1]).shape[-1])
        end = min(num_tokens, start + chunk_size)
        _fill_chunk(
            result,
            request,
            compute_logits(states[start - 1 : end - 1]),
            range(start, end),
            first_position,
            uniforms,
        )
        start = end
    return result


def _fill_chunk(
    result: PromptLogprobs,
    request: SampleRequest,
    logits: torch.Tensor,
    positions: range,
    first_position: int,
    uniforms: Array,
) -> None:
    """Fill in the results for some positions from the logits (positions, V) before each."""
    spec = request.prompt_logprobs_spec
    logprobs = torch.log_softmax(logits, -1)
    chunk, offset = slice(positions.start, positions.stop), max(0, first_position - positions.start)
    if result.logprobs is not None:
        tokens = torch.tensor(request.prompt[chunk], device=logits.device)[:, None]
        result.logprobs[chunk][offset:] = logprobs.gather(1, tokens)[offset:, 0].cpu().numpy()
    if result.top_logprobs is not None:
        values, ids = logprobs.topk(spec.num_top_logprobs, -1)
        result.top_logprobs[0][chunk][offset:] = ids[offset:].cpu().numpy()
        result.top_logprobs[1][chunk][offset:] = values[offset:].cpu().numpy()
    rows = slice(positions.start - 1, positions.stop - 1)
    if result.target_logprobs is not None and spec.target_ids is not None:
        target_ids = torch.from_numpy(spec.target_ids[rows]).to(logits.device)
        values = logprobs.gather(1, target_ids.clamp(min=0)).masked_fill(target_ids < 0, 0.0)
        result.target_logprobs[rows] = values.cpu().numpy()
    if result.alternatives is not None:
        chunk_uniforms = torch.from_numpy(uniforms[rows]).to(logits.device)
        temperature = torch.full((len(positions),), request.temperature, device=logits.device)
        settings = TokenChoiceSettings.from_rows(
            temperature, torch.ones_like(temperature), torch.zeros_like(temperature).long()
        )
        for column in range(spec.num_alternatives):
            tokens, _ = choose_tokens(logits, chunk_uniforms[:, column], settings)
            result.alternatives[0][rows, column] = tokens.cpu().numpy()
            result.alternatives[1][rows, column] = (
                logprobs.gather(1, tokens[:, None])[:, 0].cpu().numpy()
            )


def find_top_logprobs(logits: torch.Tensor, k: int) -> list[tuple[Sequence[int], Sequence[float]]]:
    """Return the k most likely tokens of each row of logits (R, V), with log-probabilities."""
    values, ids = torch.log_softmax(logits, -1).topk(k, -1)
    return list(zip(ids.tolist(), values.tolist(), strict=True))
