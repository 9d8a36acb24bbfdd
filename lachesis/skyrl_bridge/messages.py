"""Encode requests to the engine behind the bridge, and decode its results.

The messages are those of `lachesis.tinker_server.protobuf_messages`, read from the client's side.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lachesis.base.arrays import Array
from lachesis.base.errors import ServerProtocolError
from lachesis.tinker_server.protobuf_messages import DTYPES, MESSAGE_CLASSES, DecodedDatum
from lachesis.tinker_server.sample_messages import PromptLogprobs, SampledSequence, SampleResponse

_FLOAT32, _INT64 = 1, 2


@dataclass(frozen=True)
class PassResult:
    """Hold the losses and log-probabilities of a pass."""

    outputs_D: list[dict[str, Array]]
    """For each datum its arrays by name, such as `logprobs` (N,)."""
    metrics: dict[str, float]


def encode_pass(
    model_id: str,
    seq_id: int,
    data: Sequence[DecodedDatum],
    loss_fn: str,
    loss_config: dict[str, float],
    *,
    forward_only: bool,
) -> bytes:
    """Encode the request for a forward or forward-backward pass."""
    message = MESSAGE_CLASSES["ForwardBackwardRequest"](
        model_id=model_id, seq_id=seq_id, loss_fn=loss_fn, forward_only=forward_only
    )
    for datum in data:
        datum_message = message.data.add()
        chunk = datum_message.model_input.add()
        chunk.encoded_text.tokens = datum.tokens.astype("<i4").tobytes()
        for name, values in datum.inputs.items():
            entry = datum_message.loss_fn_inputs.add(key=name)
            is_whole = np.issubdtype(values.dtype, np.integer)
            entry.value.dtype = _INT64 if is_whole else _FLOAT32
            entry.value.dense = values.astype(DTYPES[entry.value.dtype]).tobytes()
            entry.value.shape.extend(values.shape)
    for name, number in loss_config.items():
        message.loss_fn_config.add(key=name, value=number)
        message.loss_fn_config_v2.add(key=name).value.number = number
    return bytes(message.SerializeToString())


def decode_pass(body: bytes) -> PassResult:
    """Decode the result of a pass.

    Raises:
        ServerProtocolError: It is not such a result.
    """
    message = _parse("ForwardBackwardOutput", body)
    outputs_D: list[dict[str, Array]] = []
    for record in message.loss_fn_outputs:
        outputs: list[dict[str, Array]] = [{} for _ in range(record.num_datums)]
        for entry in record.fields:
            tensor = entry.value
            offsets = np.frombuffer(tensor.offsets, "<i8")
            for output, start, end in zip(outputs, offsets, offsets[1:], strict=False):
                values = np.frombuffer(tensor.data[start:end], DTYPES[tensor.dtype])
                output[entry.key] = values.reshape(-1, *tensor.trailing_shape)
        outputs_D += outputs
    return PassResult(outputs_D, {entry.key: entry.value for entry in message.metrics})


def decode_samples(body: bytes, num_prompt_tokens: int) -> SampleResponse:
    """Decode the result of a sampling request.

    An engine that gives no log-probability for the first token of the prompt, not even null, gets
    the missing one.

    Raises:
        ServerProtocolError: It is not such a result.
    """
    message = _parse("SampleResponse", body)
    sequences = [
        SampledSequence(
            tokens=np.frombuffer(sequence.tokens, "<i4").tolist(),
            logprobs=np.frombuffer(sequence.logprobs, "<f4").tolist(),
            has_stopped=sequence.stop_reason == 0,
        )
        for sequence in message.sequences
    ]
    prompt_logprobs = PromptLogprobs()
    if message.HasField("prompt_logprobs"):
        values = np.frombuffer(message.prompt_logprobs, "<f4")
        if len(values) == num_prompt_tokens - 1:
            values = np.concatenate([[np.float32("nan")], values])
        prompt_logprobs.logprobs = values
    return SampleResponse(sequences, prompt_logprobs)


def _parse(name: str, body: bytes) -> Any:
    """Return a message of the engine; raise ServerProtocolError for bytes that are none."""
    message = MESSAGE_CLASSES[name]()
    try:
        message.ParseFromString(body)
    except Exception as error:
        raise ServerProtocolError(
            f"the engine behind the bridge returned {len(body)} bytes that are not a {name}: "
            f"{error}; use a version of it that the documentation names"
        ) from error
    return message
