"""Any causal language model: other layouts of attention, other linear layers, tied embeddings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPTNeoXConfig, LlamaConfig

from lachesis.engine.lora import Adapters, LoraSpec
from lachesis.engine.model import BaseModel, SamplingModel
from lachesis.engine.sampler import Sampler, SampleRequest
from lachesis.models import tokenizer

SIZES = {"vocab_size": 260, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 64}
CONFIGS = {
    "gpt2 (transposed linear layers, tied)": GPT2Config(vocab_size=260, n_embd=32, n_layer=2, n_head=2, n_positions=64),
    "llama (grouped heads, tied)": LlamaConfig(**SIZES, intermediate_size=64, num_key_value_heads=1, tie_word_embeddings=True),
    "gpt-neox (fused attention)": GPTNeoXConfig(**SIZES, intermediate_size=64),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_what_is_trained_is_what_is_sampled(tmp_path: Path, name: str) -> None:
    """The folded sampling weights give the logprobs of the training model; without a snapshot, those of the base model."""
    AutoModelForCausalLM.from_config(CONFIGS[name]).save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    base = BaseModel(str(tmp_path))
    sampling = SamplingModel(base)
    ids = torch.tensor([[1, 2, 3, 4, 5]])
    with torch.no_grad():
        untouched = base.module(ids).logits.clone()
    adapters = Adapters(base)
    adapters.add("one", LoraSpec(rank=4, seed=0))
    for parameter in adapters.parameters("one"):
        parameter.data += 0.05 * torch.randn_like(parameter)
    with torch.no_grad():
        trained = adapters.activate("one")(input_ids=ids).logits
    assert not torch.allclose(trained, untouched, atol=1e-2)
    for snapshot, expected in ((adapters.snapshot("one"), trained), (None, untouched)):
        sampling.use(snapshot)
        (found,) = Sampler(sampling).generate([SampleRequest(ids[0].tolist(), max_tokens=3, prompt_logprobs=True)])
        logprobs = torch.log_softmax(expected[0, :-1], -1).gather(1, ids[0, 1:, None])[:, 0]
        assert found.prompt_logprobs is not None
        np.testing.assert_allclose(found.prompt_logprobs[1:], logprobs.numpy(), atol=1e-4)


@pytest.mark.parametrize(
    ("spec", "trained"),
    [
        ({"train_mlp": False, "train_unembed": False}, {"attn"}),
        ({"train_attn": False, "train_unembed": False}, {"mlp"}),
        ({"train_attn": False, "train_mlp": False}, {"lm_head"}),
    ],
)
def test_a_client_chooses_what_is_trained(random_model: str, spec: dict[str, Any], trained: set[str]) -> None:
    adapters = Adapters(BaseModel(random_model))
    adapters.add("one", LoraSpec(rank=2, **spec))
    paths = {path for path in adapters.snapshot("one").factors}
    assert paths
    assert all(any(part in path for part in trained) for path in paths)


def test_adapters_come_and_go(random_model: str) -> None:
    """The last one leaves the base model as it was."""
    base = BaseModel(random_model)
    ids = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        before = base.module(ids).logits.clone()
    adapters = Adapters(base)
    for name in ("one", "two"):
        adapters.add(name, LoraSpec(rank=2, seed=1))
        for parameter in adapters.parameters(name):
            parameter.data += 0.1
    adapters.remove("one")
    adapters.remove("two")
    with torch.no_grad():
        torch.testing.assert_close(base.module(ids).logits, before)
    adapters.add("three", LoraSpec(rank=2))
    assert adapters.snapshot("three").factors
