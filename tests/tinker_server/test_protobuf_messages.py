"""Our protobuf messages against the SDK's own."""

import numpy as np
import pytest
from tinker.proto import tinker_public_pb2 as public

from lachesis.base.errors import EngineRequestError
from lachesis.tinker_server import protobuf_messages
from lachesis.tinker_server.sample_messages import PromptLogprobs, SampledSequence, SampleResponse


def request_with(**tensors):
    datum = public.Datum(
        model_input=[
            public.Chunk(
                encoded_text=public.EncodedTextChunk(tokens=np.arange(3, dtype="<i4").tobytes())
            )
        ]
    )
    for name, tensor in tensors.items():
        datum.loss_fn_inputs[name].CopyFrom(tensor)
    message = public.ForwardBackwardRequest(
        model_id="s:train:0", seq_id=7, data=[datum], loss_fn="ppo", forward_only=True
    )
    message.loss_fn_config_v2["clip_low_threshold"].number = 0.7
    return bytes(message.SerializeToString())


def dense(array, dtype):
    return public.Tensor(dense=array.tobytes(), dtype=dtype, shape=array.shape)


def test_a_request_of_the_sdk_is_read():
    body = request_with(
        advantages=dense(np.array([0.0, 1.5, -2.0], "<f4"), 1),
        target_tokens=dense(np.array([1, 2, 3], "<i8"), 2),
    )
    request = protobuf_messages.parse_forward_backward(body)
    assert (request.model_id, request.seq_id, request.loss_fn, request.forward_only) == (
        "s:train:0",
        7,
        "ppo",
        True,
    )
    assert request.loss_config == {"clip_low_threshold": 0.7}
    (datum,) = protobuf_messages.decode_data(request)
    assert datum.tokens.tolist() == [0, 1, 2]
    assert datum.inputs["advantages"].tolist() == [0.0, 1.5, -2.0]
    assert datum.inputs["target_tokens"].tolist() == [1, 2, 3]


def test_sparse_tensors_are_filled_with_zeros():
    sparse = public.SparseCsr(
        values=np.array([5.0, 7.0], "<f4").tobytes(),
        crow_indices=np.array([0, 1, 1, 2], "<i8").tobytes(),
        col_indices=np.array([1, 0], "<i8").tobytes(),
    )
    body = request_with(weights=public.Tensor(sparse_csr=sparse, dtype=1, shape=[3, 2]))
    (datum,) = protobuf_messages.decode_data(protobuf_messages.parse_forward_backward(body))
    assert datum.inputs["weights"].tolist() == [[0.0, 5.0], [0.0, 0.0], [7.0, 0.0]]


def test_a_tensor_that_does_not_fill_its_shape_is_refused():
    body = request_with(advantages=public.Tensor(dense=b"\0" * 8, dtype=1, shape=[3]))
    with pytest.raises(EngineRequestError, match=r"advantages does not fill its shape \(3,\)"):
        protobuf_messages.decode_data(protobuf_messages.parse_forward_backward(body))


def test_an_image_is_refused():
    message = public.ForwardBackwardRequest(
        data=[public.Datum(model_input=[public.Chunk(image=public.ImageChunk(data=b"x"))])]
    )
    with pytest.raises(EngineRequestError, match="trains on text tokens only"):
        protobuf_messages.decode_data(
            protobuf_messages.parse_forward_backward(message.SerializeToString())
        )


def test_a_body_that_is_no_message_is_refused():
    with pytest.raises(EngineRequestError, match="not a ForwardBackwardRequest"):
        protobuf_messages.parse_forward_backward(b"\xff\xff\xff")


def test_answers_are_read_by_the_sdk():
    """Ragged logprobs of two ranks, in the order of the datums."""
    arrays = [np.array([-1.0, -2.0]), np.array([-3.0]), np.array([[-4.0, -5.0]])]
    output = public.ForwardBackwardOutput()
    output.ParseFromString(protobuf_messages.encode_forward_backward(arrays, {"loss:sum": 2.5}))
    assert dict(output.metrics) == {"loss:sum": 2.5}
    first, second = output.loss_fn_outputs
    assert (first.num_datums, second.num_datums) == (2, 1)
    assert np.frombuffer(first.fields["logprobs"].offsets, "<i8").tolist() == [0, 8, 12]
    assert list(second.fields["logprobs"].trailing_shape) == [2]
    sampled = public.SampleResponse()
    top_k = np.array([[1, 7], [2, 9]]), np.array([[-0.5, -1.5], [-0.25, -3.0]])
    prompt = PromptLogprobs(
        logprobs=np.array([np.nan, -2.0]),
        top_logprobs=top_k,
        target_logprobs=np.array([[-4.0]]),
        alternatives=top_k,
    )
    one, other = (
        SampledSequence([1, 2], [-0.5, -0.25], True, top_k),
        SampledSequence([3], [-1.0], False),
    )
    sampled.ParseFromString(
        protobuf_messages.encode_sample_response(SampleResponse([one, other], prompt))
    )
    assert [sequence.stop_reason for sequence in sampled.sequences] == [0, 1]
    assert np.frombuffer(sampled.sequences[0].tokens, "<i4").tolist() == [1, 2]
    assert np.isnan(np.frombuffer(sampled.prompt_logprobs, "<f4")[0])
    assert sampled.prompt_alt_tokens.tokens.shape == [2, 2]
    assert np.frombuffer(sampled.target_prompt_logprobs.dense, "<f4").tolist() == [-4.0]
    for found in (sampled.topk_prompt_logprobs, sampled.sequences[0].topk_sampled_logprobs):
        assert (found.k, found.length) == (2, 2)
        assert np.frombuffer(found.token_ids, "<i4").tolist() == [1, 7, 2, 9]
    assert not sampled.sequences[1].HasField("topk_sampled_logprobs")


def test_a_sparse_tensor_of_json_is_filled_with_minus_one():
    body = {
        "shape": [2, 2],
        "data": [5],
        "sparse_crow_indices": [0, 0, 1],
        "sparse_col_indices": [1],
        "dtype": "int64",
    }
    assert protobuf_messages.parse_json_tensor("target", body).tolist() == [[-1, -1], [-1, 5]]
    for wrong in (
        {},
        {**body, "shape": [2**40, 2**40]},
        {**body, "sparse_col_indices": [7]},
        {"shape": [3], "data": [1]},
    ):
        with pytest.raises(EngineRequestError, match="target is not a tensor"):
            protobuf_messages.parse_json_tensor("target", wrong)
