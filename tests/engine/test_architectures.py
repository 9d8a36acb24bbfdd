"""Any causal language model: other layouts of attention, other linear layers, tied embeddings."""

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from lachesis.base.errors import UnsupportedModelError
from lachesis.engine.adapter_training import TrainingModel
from lachesis.engine.base_model.forward_pass import BaseLanguageModel
from lachesis.engine.base_model.lora_layers import iterate_parameters
from lachesis.engine.sampling.sampler import Sampler, SamplingJob
from lachesis.tinker_server.model_description import LoraSpec
from lachesis.tinker_server.protobuf_messages import DecodedDatum
from lachesis.tinker_server.sample_messages import PromptLogprobsSpec, SampleRequest
from lachesis.tiny_model.build import build_tokenizer

SIZES = {
    "vocab_size": 260,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}
CONFIGS = {
    "gpt2 (transposed linear layers, tied)": GPT2Config(
        vocab_size=260, n_embd=32, n_layer=2, n_head=2, n_positions=64
    ),
    "llama (grouped heads, tied)": LlamaConfig(
        **SIZES, intermediate_size=64, num_key_value_heads=1, tie_word_embeddings=True
    ),
    "gpt-neox (fused attention)": GPTNeoXConfig(**SIZES, intermediate_size=64),
    "mistral (looks back 4 tokens)": MistralConfig(
        **SIZES, intermediate_size=64, num_key_value_heads=1, sliding_window=4
    ),
    "gemma 2 (every other layer looks back 4 tokens, capped logits)": Gemma2Config(
        **SIZES,
        intermediate_size=64,
        num_key_value_heads=1,
        head_dim=16,
        sliding_window=4,
        query_pre_attn_scalar=16,
    ),
    "qwen 3 (half of the layers look back 4 tokens)": Qwen3Config(
        **SIZES,
        intermediate_size=64,
        num_key_value_heads=1,
        head_dim=16,
        use_sliding_window=True,
        sliding_window=4,
        max_window_layers=1,
    ),
    "qwen 3 mixture of experts": Qwen3MoeConfig(
        **SIZES,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_experts=4,
        num_experts_per_tok=2,
        num_key_value_heads=1,
        head_dim=16,
    ),
}


def model_of(folder, name):
    AutoModelForCausalLM.from_config(CONFIGS[name]).save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return BaseLanguageModel(str(folder))


def trained_model(base, **spec):
    """One whose adapter changes the output."""
    model = TrainingModel(base, LoraSpec(**{"rank": 4, "seed": 0, **spec}))
    generator = torch.Generator().manual_seed(1)
    for parameter in iterate_parameters(model.factors):
        parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator)
    return model


def sample(base, *jobs):
    """Draw them together."""
    sampler, found = Sampler(base, seed=0), {}
    for number, (request, snapshot) in enumerate(jobs):
        sampler.add(
            SamplingJob(
                request, snapshot, lambda result, number=number: found.__setitem__(number, result)
            )
        )
    while sampler.is_busy:
        sampler.step()
    return [found[number] for number in range(len(jobs))]


def run_all(passes):
    while True:
        try:
            next(passes)
        except StopIteration as end:
            return end.value


def expected(base, tokens, snapshot):
    """Log-probabilities of each token but the first, in one pass without a cache."""
    ids = torch.tensor([tokens])
    with torch.no_grad():
        base.lora_layers.use_for_sampling([(None, snapshot)])
        logits = base.compute_logits(base.compute_states(ids))[0, :-1]
    return torch.log_softmax(logits, -1).gather(1, ids[0, 1:, None])[:, 0].numpy()


@pytest.mark.parametrize("name", CONFIGS)
def test_what_is_trained_is_what_is_sampled(tmp_path, name):
    """Token by token with a cache, sequences of different lengths and of two adapters and the base
    model in one batch: the log-probabilities are those of one pass over the whole sequence, by the
    model in training and by Hugging Face's own.
    """
    base = model_of(tmp_path, name)
    one, other = trained_model(base), trained_model(base, rank=2)
    request = {"max_tokens": 12, "prompt_logprobs_spec": PromptLogprobsSpec(include_logprobs=True)}
    jobs = [
        (SampleRequest([1, 2, 3, 4, 5], 3, **request), one.snapshot()),
        (SampleRequest([7], 2, **request), None),
        (SampleRequest([9, 8, 7, 6, 5, 4, 3, 2, 1], 1, **request), other.snapshot()),
    ]
    for (asked, snapshot), found in zip(jobs, sample(base, *jobs), strict=True):
        for sequence in found.sequences:
            whole = expected(base, [*asked.prompt, *sequence.tokens], snapshot)
            np.testing.assert_allclose(sequence.logprobs, whole[len(asked.prompt) - 1 :], atol=1e-4)
        assert found.prompt_logprobs.logprobs is not None
        np.testing.assert_allclose(
            found.prompt_logprobs.logprobs[1:], expected(base, asked.prompt, snapshot), atol=1e-4
        )
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    tokens = jobs[1][0].prompt + found.sequences[0].tokens
    with torch.no_grad():
        logits = plain(torch.tensor([tokens])).logits[0, :-1]
    theirs = torch.log_softmax(logits, -1).gather(1, torch.tensor(tokens)[1:, None])[:, 0].numpy()
    np.testing.assert_allclose(expected(base, tokens, None), theirs, atol=1e-4)
    data = [DecodedDatum(np.array([1, 2, 3, 4]), {"target_tokens": np.array([2, 3, 4, 5])})]
    passes = one.forward_backward(data, "cross_entropy", {}, forward_only=True)
    logprobs_D, _ = run_all(passes)
    np.testing.assert_allclose(
        logprobs_D[0], expected(base, [1, 2, 3, 4, 5], jobs[0][1]), atol=1e-4
    )


def test_an_adapter_that_is_alone_is_folded_in_and_gives_the_same(tmp_path):
    """A long sample crosses from the one way to the other."""
    base = model_of(tmp_path, "llama (grouped heads, tied)")
    snapshot = trained_model(base).snapshot()
    (found,) = sample(base, (SampleRequest([1, 2, 3], max_tokens=40), snapshot))
    assert base.lora_layers._merged_adapter is snapshot
    whole = expected(base, [1, 2, 3, *found.sequences[0].tokens], snapshot)
    np.testing.assert_allclose(found.sequences[0].logprobs, whole[2:], atol=1e-4)
    base.lora_layers.use_for_training(trained_model(base)._trained_adapter)
    base.lora_layers.use_for_sampling([(None, None)])
    with torch.no_grad():
        fresh = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)(
            torch.tensor([[1, 2]])
        ).logits
        torch.testing.assert_close(base.module(torch.tensor([[1, 2]])).logits, fresh)


@pytest.mark.parametrize(
    ("spec", "trained"),
    [
        ({"train_mlp": False, "train_unembed": False}, {"attn"}),
        ({"train_attn": False, "train_unembed": False}, {"mlp"}),
        ({"train_attn": False, "train_mlp": False}, {"lm_head"}),
    ],
)
def test_a_client_chooses_what_is_trained(random_model, spec, trained):
    paths = set(TrainingModel(BaseLanguageModel(random_model), LoraSpec(rank=2, **spec)).factors)
    assert paths
    assert all(any(part in path for part in trained) for path in paths)


def test_a_model_that_keeps_more_than_keys_and_values_is_refused_by_name(tmp_path):
    config = MambaConfig(vocab_size=260, hidden_size=16, num_hidden_layers=1, state_size=4)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    build_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match=r"\(mamba\) cannot be served correctly"):
        BaseLanguageModel(str(tmp_path))
