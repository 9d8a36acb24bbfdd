"""Encode and decode the protobuf messages of the Tinker protocol.

These are forward-backward requests, and the responses to them and to sampling requests. Message and
field numbers are those of the public Tinker SDK 0.38. They are declared under a package name of our
own, because one process (such as a test with both the SDK and the engine) cannot hold two
descriptions of one file name. Tensors are little-endian bytes with a dtype and a shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from lachesis.base.arrays import Array
from lachesis.base.errors import EngineRequestError
from lachesis.tinker_server.sample_messages import SampleResponse

if TYPE_CHECKING:
    from google.protobuf.message import Message

MAX_DENSE_ELEMENTS = 2**27
_PACKAGE = "lachesis_wire"
# Each message has fields of the form "NUMBER NAME TYPE [FLAG]"; the flag is `*` for repeated, `?`
# for
# explicit presence, or the name of a oneof.
_SCHEMA: dict[str, list[str]] = {
    "EncodedTextChunk": ["1 tokens bytes"],
    "ImageChunk": ["1 data bytes"],
    "Chunk": [
        "1 encoded_text .EncodedTextChunk kind",
        "2 image .ImageChunk kind",
        "3 dmel .ImageChunk kind",
    ],
    "SparseCsr": ["1 values bytes", "2 crow_indices bytes", "3 col_indices bytes"],
    "Tensor": [
        "1 dense bytes kind",
        "2 sparse .SparseCsr kind",
        "3 dtype int32",
        "4 shape int64 *",
    ],
    "TensorEntry": ["1 key string", "2 value .Tensor"],
    "Datum": ["1 model_input .Chunk *", "2 loss_fn_inputs .TensorEntry *"],
    "LossConfigValue": ["1 number double kind", "2 text string kind"],
    "NumberEntry": ["1 key string", "2 value double"],
    "ConfigEntry": ["1 key string", "2 value .LossConfigValue"],
    "ForwardBackwardRequest": [
        "1 model_id string",
        "2 seq_id int32",
        "3 data .Datum *",
        "4 loss_fn string",
        "5 loss_fn_config .NumberEntry *",
        "6 forward_only bool",
        "7 loss_fn_config_v2 .ConfigEntry *",
    ],
    "BatchedTensor": [
        "1 data bytes",
        "2 offsets bytes",
        "3 dtype int32",
        "4 trailing_shape int64 *",
    ],
    "BatchedEntry": ["1 key string", "2 value .BatchedTensor"],
    "ArrayRecord": ["1 type_tag string", "2 fields .BatchedEntry *", "3 num_datums int64"],
    "ForwardBackwardOutput": [
        "1 loss_fn_output_type string",
        "2 loss_fn_outputs .ArrayRecord *",
        "3 metrics .NumberEntry *",
    ],
    "TopkLogprobs": ["1 token_ids bytes", "2 logprobs bytes", "3 k uint32", "4 length uint32"],
    "PromptAltTokens": ["1 tokens .Tensor", "2 logprobs .Tensor"],
    "SampledSequence": [
        "1 stop_reason int32",
        "2 tokens bytes",
        "3 logprobs bytes ?",
        "4 topk_sampled_logprobs .TopkLogprobs",
    ],
    "SampleResponse": [
        "1 sequences .SampledSequence *",
        "2 prompt_logprobs bytes ?",
        "3 topk_prompt_logprobs .TopkLogprobs",
        "4 prompt_cache_hit_tokens int32",
        "5 target_prompt_logprobs .Tensor",
        "6 prompt_alt_tokens .PromptAltTokens",
    ],
}
_FLOAT32, _INT64, _INT32 = 1, 2, 3
DTYPES: dict[int, np.dtype[Any]] = {
    _FLOAT32: np.dtype("<f4"),
    _INT64: np.dtype("<i8"),
    _INT32: np.dtype("<i4"),
}


def _add_field(message: Message, declaration: str) -> None:
    """Add a field that is declared as "NUMBER NAME TYPE [FLAG]" to a message."""
    number, name, type_name, *flag = declaration.split()
    proto = descriptor_pb2.FieldDescriptorProto
    field_proto = message.field.add(name=name, number=int(number), label=proto.LABEL_OPTIONAL)
    if type_name.startswith("."):
        field_proto.type, field_proto.type_name = proto.TYPE_MESSAGE, f".{_PACKAGE}{type_name}"
    else:
        field_proto.type = getattr(proto, f"TYPE_{type_name.upper()}")
    if flag == ["*"]:
        field_proto.label = proto.LABEL_REPEATED
    elif flag:
        oneof_name = f"_{name}" if flag == ["?"] else flag[0]
        oneof_names = [oneof.name for oneof in message.oneof_decl]
        if oneof_name not in oneof_names:
            message.oneof_decl.add(name=oneof_name)
            oneof_names.append(oneof_name)
        field_proto.oneof_index = oneof_names.index(oneof_name)
        field_proto.proto3_optional = flag == ["?"]


def _build_message_classes() -> dict[str, Any]:
    """Build the classes of all messages of the protocol, by name."""
    # On the wire a protobuf map is a repeated message with key 1 and value 2, as the *Entry
    # messages declare it.
    file = descriptor_pb2.FileDescriptorProto(
        name="lachesis/wire.proto", package=_PACKAGE, syntax="proto3"
    )
    for name, fields in _SCHEMA.items():
        message = file.message_type.add(name=name)
        for declaration in fields:
            _add_field(message, declaration)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}"))
        for name in _SCHEMA
    }


MESSAGE_CLASSES = _build_message_classes()


@dataclass(frozen=True)
class DecodedDatum:
    """Hold one sequence: `tokens` (N,) int64, and loss inputs (N,) or (N, K) by name."""

    tokens: Array
    inputs: dict[str, Array]


@dataclass(frozen=True)
class ForwardBackwardRequest:
    """Hold a forward or forward-backward request; `decode_data` decodes its datums."""

    model_id: str
    seq_id: int
    datums: Sequence[Any]
    loss_fn: str
    forward_only: bool
    loss_config: dict[str, float | str] = field(default_factory=dict)


def parse_forward_backward(body: bytes) -> ForwardBackwardRequest:
    """Parse the body of `POST /forward_backward`.

    Tensors are decoded later, when the operation runs, so that a bad one fails its own future and
    no number is missing in the client's sequence of requests.

    Raises:
        EngineRequestError: The body is not such a message.
    """
    message = MESSAGE_CLASSES["ForwardBackwardRequest"]()
    try:
        message.ParseFromString(body)
    except Exception as error:
        raise EngineRequestError(
            f"the body ({len(body)} bytes) is not a ForwardBackwardRequest: {error}"
        ) from error
    config: dict[str, float | str] = {entry.key: entry.value for entry in message.loss_fn_config}
    for entry in message.loss_fn_config_v2:
        if entry.value.WhichOneof("kind") == "text":
            config[entry.key] = entry.value.text
        else:
            config[entry.key] = entry.value.number
    return ForwardBackwardRequest(
        model_id=message.model_id,
        seq_id=message.seq_id,
        datums=message.data,
        loss_fn=message.loss_fn,
        forward_only=message.forward_only,
        loss_config=config,
    )


def decode_data(request: ForwardBackwardRequest) -> list[DecodedDatum]:
    """Return the request's datums as arrays.

    Raises:
        EngineRequestError: A datum holds images or audio, or a malformed tensor.
    """
    return [_decode_datum(message) for message in request.datums]


def _decode_datum(message: Message) -> DecodedDatum:
    tokens = [_decode_text_tokens(chunk) for chunk in message.model_input]
    return DecodedDatum(
        tokens=np.concatenate(tokens).astype(np.int64) if tokens else np.zeros(0, np.int64),
        inputs={
            entry.key: _decode_tensor(entry.key, entry.value) for entry in message.loss_fn_inputs
        },
    )


def _decode_text_tokens(chunk: Message) -> Array:
    kind = chunk.WhichOneof("kind")
    if kind != "encoded_text":
        raise EngineRequestError(
            f"a model input contains a chunk of kind {kind}; this engine trains on text tokens only"
        )
    return np.frombuffer(chunk.encoded_text.tokens, np.dtype("<i4"))


def _decode_tensor(name: str, tensor: Message) -> Array:
    """Return a tensor as an array of its shape; raise EngineRequestError if it does not fill it."""
    dtype = DTYPES.get(tensor.dtype)
    shape = tuple(tensor.shape)
    if dtype is None:
        raise EngineRequestError(
            f"loss input {name} has dtype {tensor.dtype}; allowed: float32, int64, int32"
        )
    try:
        if tensor.WhichOneof("kind") == "sparse":
            return _decode_csr(tensor.sparse, dtype, shape)
        return np.frombuffer(tensor.dense, dtype).reshape(shape)
    except (ValueError, IndexError) as error:
        raise EngineRequestError(
            f"loss input {name} does not fill its shape {shape}: {error}"
        ) from error


def _decode_csr(sparse: Message, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
    _check_sparse_shape(shape)
    dense = np.zeros(shape, dtype)
    row_offsets = np.frombuffer(sparse.crow_indices, np.int64)
    rows = np.repeat(np.arange(len(row_offsets) - 1), np.diff(row_offsets))
    dense[rows, np.frombuffer(sparse.col_indices, np.int64)] = np.frombuffer(sparse.values, dtype)
    return dense


def encode_forward_backward(logprobs_D: Sequence[Array], metrics: dict[str, float]) -> bytes:
    """Encode the response to a forward-backward request.

    Args:
        logprobs_D: For each datum the log-probability of every target, (N,) or (N, K) float32.
        metrics: Metrics, whose names end with the reduction for the client (`loss:sum`).
    """
    output = MESSAGE_CLASSES["ForwardBackwardOutput"](loss_fn_output_type="TorchLossReturn")
    start = 0
    while start < len(logprobs_D):
        trailing_shape = logprobs_D[start].shape[1:]
        stop = start
        while stop < len(logprobs_D) and logprobs_D[stop].shape[1:] == trailing_shape:
            stop += 1
        _add_array_record(output, logprobs_D[start:stop], trailing_shape)
        start = stop
    for key, value in metrics.items():
        output.metrics.add(key=key, value=value)
    return bytes(output.SerializeToString())


def _add_array_record(
    output: Message, arrays: Sequence[Array], trailing_shape: tuple[int, ...]
) -> None:
    """Add an array per datum, joined, to the outputs of a pass."""
    blobs = [np.ascontiguousarray(array, np.dtype("<f4")).tobytes() for array in arrays]
    record = output.loss_fn_outputs.add(num_datums=len(blobs))
    entry = record.fields.add(key="logprobs")
    entry.value.data = b"".join(blobs)
    entry.value.offsets = np.cumsum([0, *map(len, blobs)]).astype("<i8").tobytes()
    entry.value.dtype = _FLOAT32
    entry.value.trailing_shape.extend(trailing_shape)


def encode_sample_response(sample_response: SampleResponse) -> bytes:
    """Encode the response to a sampling request."""
    message = MESSAGE_CLASSES["SampleResponse"]()
    for sampled_sequence in sample_response.sequences:
        sequence = message.sequences.add(
            stop_reason=0 if sampled_sequence.has_stopped else 1,
            tokens=np.asarray(sampled_sequence.tokens, "<i4").tobytes(),
            logprobs=np.asarray(sampled_sequence.logprobs, "<f4").tobytes(),
        )
        if sampled_sequence.top_logprobs is not None:
            _fill_top_logprobs(sequence.topk_sampled_logprobs, sampled_sequence.top_logprobs)
    prompt_logprobs = sample_response.prompt_logprobs
    if prompt_logprobs.logprobs is not None:
        message.prompt_logprobs = np.asarray(prompt_logprobs.logprobs, "<f4").tobytes()
    if prompt_logprobs.top_logprobs is not None:
        _fill_top_logprobs(message.topk_prompt_logprobs, prompt_logprobs.top_logprobs)
    if prompt_logprobs.target_logprobs is not None:
        _fill_tensor(message.target_prompt_logprobs, prompt_logprobs.target_logprobs, _FLOAT32)
    if prompt_logprobs.alternatives is not None:
        _fill_tensor(message.prompt_alt_tokens.tokens, prompt_logprobs.alternatives[0], _INT32)
        _fill_tensor(message.prompt_alt_tokens.logprobs, prompt_logprobs.alternatives[1], _FLOAT32)
    return bytes(message.SerializeToString())


def _fill_top_logprobs(message: Message, top_logprobs: tuple[Array, Array]) -> None:
    ids, logprobs = top_logprobs
    message.token_ids, message.logprobs = (
        np.asarray(ids, "<i4").tobytes(),
        np.asarray(logprobs, "<f4").tobytes(),
    )
    message.length, message.k = ids.shape


def _fill_tensor(message: Message, array: Array, dtype: int) -> None:
    message.dense, message.dtype = np.ascontiguousarray(array, DTYPES[dtype]).tobytes(), dtype
    message.shape.extend(array.shape)


def _check_sparse_shape(shape: tuple[int, ...]) -> None:
    """Limit the size of a sparse tensor, because rows that are left out cost nothing on the wire.

    Raises:
        ValueError: The tensor is too large or does not have two axes.
    """
    if len(shape) != 2 or min(shape) < 0 or shape[0] * shape[1] > MAX_DENSE_ELEMENTS:
        raise ValueError(
            f"a sparse tensor must have two axes and at most {MAX_DENSE_ELEMENTS} elements"
        )


def parse_json_tensor(name: str, body: Any) -> Array:
    """Parse a tensor of a JSON request.

    It has `data` and `shape`, or compressed rows (`sparse_crow_indices`, `sparse_col_indices`)
    whose missing elements are -1.

    Raises:
        EngineRequestError: The body is not such a tensor.
    """
    try:
        shape, values = tuple(body["shape"]), np.asarray(body["data"], np.int64)
        if body.get("sparse_crow_indices") is None:
            return values.reshape(shape)
        _check_sparse_shape(shape)
        dense = np.full(shape, -1, np.int64)
        rows = np.repeat(
            np.arange(len(body["sparse_crow_indices"]) - 1), np.diff(body["sparse_crow_indices"])
        )
        dense[rows, np.asarray(body["sparse_col_indices"], np.int64)] = values
        return dense
    except (KeyError, TypeError, ValueError, IndexError, OverflowError) as error:
        raise EngineRequestError(
            f"{name} is not a tensor of whole numbers: {type(error).__name__}: {error}"
        ) from error
