"""End answers at stop strings, which not every engine can look for beside its end tokens."""

from __future__ import annotations

import bisect
from dataclasses import replace

from lachesis.bridge.model_limits import BridgedModel
from lachesis.engine.sample_messages import SampledSequence, SampleRequest, SampleResponse


def cut_at_stop_string(
    response: SampleResponse, request: SampleRequest, model: BridgedModel
) -> SampleResponse:
    """Return the response with each answer cut after the token that completes a stop string."""
    if not request.stop_strings:
        return response
    sequences = [_cut(sequence, request.stop_strings, model) for sequence in response.sequences]
    return SampleResponse(sequences, response.prompt_logprobs)


def _cut(
    sequence: SampledSequence, stop_strings: tuple[str, ...], model: BridgedModel
) -> SampledSequence:
    def has_stop(length: int) -> bool:
        text = model.tokenizer.decode(sequence.tokens[:length])
        return any(stop in text for stop in stop_strings)

    # A stop string that a beginning of the answer holds is also in every longer one.
    length = bisect.bisect_left(range(len(sequence.tokens) + 1), True, key=has_stop)
    if length > len(sequence.tokens):
        return sequence
    return replace(
        sequence,
        tokens=sequence.tokens[:length],
        logprobs=sequence.logprobs[:length],
        has_stopped=True,
    )
