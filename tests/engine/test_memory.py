"""The engine on a device with little memory: forecast, smaller passes, errors with a name.

The device is the processor under `LiveBytesCounter`, which counts the bytes of every tensor that
an operation creates, and refuses more than its limit as a card does.
"""

import functools

import numpy as np
import pytest
import torch
from transformers import AutoConfig, Qwen3Config, Qwen3ForCausalLM

from lachesis.base.errors import InsufficientMemoryError, UnsupportedModelError
from lachesis.engine.adapter_training import TrainingModel
from lachesis.engine.base_model.forward_pass import BaseLanguageModel
from lachesis.engine.base_model.load import LoadSettings
from lachesis.engine.base_model.memory_forecast import LiveBytesCounter, measure_model_sizes
from lachesis.engine.base_model.memory_plan import (
    MemoryPlan,
    ModelUse,
    compute_needed_bytes,
    make_memory_plan,
)
from lachesis.engine.model_thread import make_tinker_error, step_sampler
from lachesis.engine.sampling.admission import SamplingJob
from lachesis.engine.sampling.sampler import Sampler
from lachesis.tinker_server.model_description import LoraSpec
from lachesis.tinker_server.protobuf_messages import DecodedDatum
from lachesis.tinker_server.sample_messages import SampleRequest, SampleResponse
from lachesis.tiny_model import build

GIB = 2**30
RANK = 32


def write_model(folder, **sizes):
    """Write a Qwen3 with random weights and the tiny model's tokenizer."""
    torch.manual_seed(0)
    config = Qwen3Config(
        head_dim=64, max_position_embeddings=8192, tie_word_embeddings=True, eos_token_id=258,
        **sizes,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(folder)
    build.build_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(
        tmp_path_factory.mktemp("model"),
        vocab_size=8_000, hidden_size=256, intermediate_size=768, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip


@pytest.fixture(scope="module")
def base(folder):
    return BaseLanguageModel(str(folder))


@pytest.fixture(scope="module")
def large_base(tmp_path_factory):
    """A model of 48 million parameters, as in `bench/engine_speed.py`."""
    folder = write_model(
        tmp_path_factory.mktemp("model-48m"),
        vocab_size=32_000, hidden_size=512, intermediate_size=1536, num_hidden_layers=10,
        num_attention_heads=8, num_key_value_heads=4,
    )  # fmt: skip
    return BaseLanguageModel(str(folder))


@pytest.fixture(scope="module")
def sizes(folder):
    config = AutoConfig.from_pretrained(folder)
    return measure_model_sizes(config, rank=RANK, dtype=torch.float32)


def make_data(lengths):
    generator = np.random.default_rng(0)
    data = []
    for length in lengths:
        tokens = generator.integers(0, 8_000, length + 1)
        weights = np.ones(length, np.float32)
        data.append(DecodedDatum(tokens[:-1], {"target_tokens": tokens[1:], "weights": weights}))
    return data


def compute_gradient(base, plan, lengths, limit=float("inf")):
    """Return the gradient, the number of passes, and the peak of live bytes beyond the weights."""
    base.memory_plan = plan
    model = TrainingModel(base, LoraSpec(rank=RANK, seed=1))
    for _, b in model.factors.values():
        with torch.no_grad():
            b.normal_(generator=torch.Generator().manual_seed(len(b)), std=0.01)
    with LiveBytesCounter(limit) as counter:
        passes = model.forward_backward(make_data(lengths), "cross_entropy", {}, forward_only=False)
        num_passes = sum(1 for _ in passes)
    return model._gradient.clone(), num_passes, counter.peak_bytes


LARGE_PASSES = MemoryPlan(limits_logits=False)


def check_smaller_passes(base, lengths, limit):
    """The sequences do not fit together; nothing is lost when a pass fails."""
    expected, num_passes, peak_bytes = compute_gradient(base, LARGE_PASSES, lengths)
    assert num_passes == 1
    assert peak_bytes > limit
    gradient, num_passes, peak_bytes = compute_gradient(base, LARGE_PASSES, lengths, limit)
    assert num_passes > 1
    assert peak_bytes <= limit
    assert float((gradient - expected).norm() / expected.norm()) < 1e-5
    assert base.memory_plan.max_pass_tokens < LARGE_PASSES.max_pass_tokens


def test_on_a_small_device_smaller_passes_give_the_same_gradients(base):
    check_smaller_passes(base, [100] * 8, 90_000_000)


@pytest.mark.long
def test_48_million_parameters_are_trained_on_a_device_of_2_gib(
    large_base: BaseLanguageModel,
) -> None:
    weights_bytes = sum(weight.nbytes for weight in large_base.module.parameters())
    check_smaller_passes(large_base, [700] * 8, 2 * GIB - weights_bytes)


def test_a_single_sequence_that_does_not_fit_computes_its_activations_again(base):
    expected, _, peak_bytes = compute_gradient(base, LARGE_PASSES, [300])
    gradient, _, smaller_peak = compute_gradient(base, LARGE_PASSES, [300], 0.7 * peak_bytes)
    assert smaller_peak <= 0.7 * peak_bytes
    assert float((gradient - expected).norm() / expected.norm()) < 1e-5
    assert base.memory_plan.recomputes(300)


def test_a_sequence_that_never_fits_is_refused_and_leaves_the_gradients_as_they_were(base):
    base.memory_plan = LARGE_PASSES
    model = TrainingModel(base, LoraSpec(rank=RANK, seed=1))
    list(model.forward_backward(make_data([40]), "cross_entropy", {}, forward_only=False))
    before = model._gradient.clone()
    with (
        LiveBytesCounter(9_000_000),
        pytest.raises(InsufficientMemoryError, match="one sequence of 200 tokens does not fit"),
    ):
        list(model.forward_backward(make_data([200]), "cross_entropy", {}, forward_only=False))
    assert torch.equal(model._gradient, before)
    list(model.forward_backward(make_data([40]), "cross_entropy", {}, forward_only=False))
    assert torch.allclose(model._gradient, 2 * before, atol=1e-6)


@pytest.mark.parametrize("recomputes", [False, True])
def test_the_forecast_is_within_a_tenth_of_the_measured_peak(base, sizes, recomputes):
    plan = MemoryPlan(limits_logits=False, max_plain_tokens=0 if recomputes else None)
    _, _, peak_bytes = compute_gradient(base, plan, [250, 250])
    size = sizes.recomputed_pass if recomputes else sizes.plain_pass
    forecast = size.compute_bytes(500)
    assert 0.9 < forecast / peak_bytes < 1.1


def test_the_forecast_knows_the_weights_and_the_cache(base, sizes):
    assert sizes.weights_bytes == sum(weight.nbytes for weight in base.module.parameters())
    assert sizes.cache_bytes_per_token == base.kv_bytes_per_token


def test_a_model_that_does_not_fit_is_refused_before_it_is_loaded(folder):
    with pytest.raises(InsufficientMemoryError) as raised:
        BaseLanguageModel(str(folder), LoadSettings(memory_limit_bytes=40_000_000))
    message = str(raised.value)
    assert f"{folder.name}, float32, rank 32, 4,096 tokens a sequence: at least" in message
    assert "0.0 GiB are free; its weights take 0.0 GiB; choose a smaller model" in message
    settings = LoadSettings(memory_limit_bytes=200_000_000, sequence_tokens=8192)
    with pytest.raises(InsufficientMemoryError, match="tokens a sequence would fit"):
        BaseLanguageModel(str(folder), settings)


def test_the_plan_divides_what_is_there(sizes):
    use = ModelUse("model", "float32", RANK, 1024)
    needed_bytes = compute_needed_bytes(sizes, use)
    small, large = (make_memory_plan(sizes, use, needed_bytes * factor) for factor in (1.01, 8))
    assert small.recomputes(1024)
    assert not large.recomputes(1024)
    assert small.cache_bytes >= 1024 * sizes.cache_bytes_per_token
    for factor, plan in ((1.01, small), (8, large)):
        if plan.recomputes(plan.max_pass_tokens):
            size = sizes.recomputed_pass
        else:
            size = sizes.plain_pass
        total = sizes.fixed_bytes + plan.cache_bytes + size.compute_bytes(plan.max_pass_tokens)
        assert total < needed_bytes * factor


def test_weights_in_fewer_bits_need_less(folder, sizes):
    config = AutoConfig.from_pretrained(folder)
    in_8_bits = measure_model_sizes(config, rank=8, dtype=torch.bfloat16, bits=8)
    in_4_bits = measure_model_sizes(config, rank=8, dtype=torch.bfloat16, bits=4)
    assert in_4_bits.weights_bytes < in_8_bits.weights_bytes < sizes.weights_bytes / 2


@pytest.fixture
def tiny_base(random_model):
    return BaseLanguageModel(random_model)


def run_sampler(base, requests):
    """Sample as the model thread does, in this thread, and return the results in order."""
    sampler = Sampler(base, seed=0)
    results: dict[int, SampleResponse | Exception] = {}
    for index, request in enumerate(requests):
        sampler.add(SamplingJob(request, None, functools.partial(results.__setitem__, index)))
    while sampler.is_busy:
        step_sampler(sampler)
    return [results[index] for index in range(len(requests))]


@pytest.mark.parametrize("failing_method", ["decode", "compute_states"])
def test_sampling_that_runs_out_of_memory_goes_on_with_fewer_sequences(
    tiny_base, monkeypatch, failing_method
):
    """The same tokens come, from passes of at most two rows; no request is lost."""
    requests = [
        SampleRequest([1, 2, seed], num_samples=3, max_tokens=12, seed=seed) for seed in range(4)
    ]
    expected = run_sampler(tiny_base, requests)
    original = getattr(tiny_base, failing_method)
    refused: list[int] = []

    def run_out_of_memory(ids, *rest, **options):
        if len(ids) > 2:
            refused.append(len(ids))
            raise torch.OutOfMemoryError("injected")
        return original(ids, *rest, **options)

    monkeypatch.setattr(tiny_base, failing_method, run_out_of_memory)
    results = run_sampler(tiny_base, requests)
    assert refused
    for result, reference in zip(results, expected, strict=True):
        assert isinstance(result, SampleResponse)
        assert isinstance(reference, SampleResponse)
        assert [sequence.tokens for sequence in result.sequences] == [
            sequence.tokens for sequence in reference.sequences
        ]


def test_a_single_sequence_without_memory_is_refused_and_the_next_request_is_served(
    tiny_base, monkeypatch
):
    def run_out_of_memory(*_, **__):
        raise torch.OutOfMemoryError("injected")

    with monkeypatch.context() as patch:
        patch.setattr(tiny_base, "decode", run_out_of_memory)
        (refused,) = run_sampler(tiny_base, [SampleRequest([1, 2], max_tokens=4, seed=1)])
    assert isinstance(refused, torch.OutOfMemoryError)
    assert "not even for one sequence at a time" in str(make_tinker_error(refused))
    (served,) = run_sampler(tiny_base, [SampleRequest([1, 2], max_tokens=4, seed=1)])
    assert isinstance(served, SampleResponse)


def test_a_model_in_8_bits_is_trained(folder):
    base = BaseLanguageModel(str(folder), LoadSettings(base_weights="8bit"))
    layer = base.module.model.layers[0].mlp.up_proj
    assert layer.weight.nbytes == layer.in_features * layer.out_features
    model = TrainingModel(base, LoraSpec(rank=8, seed=1))
    losses = []
    for _ in range(3):
        passes = model.forward_backward(make_data([60]), "cross_entropy", {}, forward_only=False)
        try:
            while True:
                next(passes)
        except StopIteration as end:
            losses.append(end.value[1]["loss:sum"])
        model.optim_step({"learning_rate": 1e-3})
    assert losses[2] < losses[1] < losses[0]
    assert isinstance(run_sampler(base, [SampleRequest([1, 2], max_tokens=4)])[0], SampleResponse)


def test_4_bits_are_refused_on_a_processor(folder):
    settings = LoadSettings(base_weights="4bit", device=torch.device("cpu"))
    with pytest.raises(UnsupportedModelError, match="needs a CUDA card"):
        BaseLanguageModel(str(folder), settings)


def test_auto_precision_is_float32_on_a_processor():
    device = torch.device("cpu")
    assert LoadSettings(device=device).dtype == torch.float32
    assert LoadSettings(device=device, precision="bfloat16").dtype == torch.bfloat16
