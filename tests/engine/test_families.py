"""The engine against transformers and PEFT, by the program that makes the page of families."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from bench import model_families
from lachesis.base.errors import UnsupportedModelError
from lachesis.engine.base_model.forward_pass import BaseLanguageModel
from lachesis.tiny_model.build import build_tokenizer

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # of PEFT, about tied weights


@pytest.mark.parametrize(
    "family", ["llama4_text", "deepseek_v2", "deepseek_v3", "dots1", "glm4_moe"]
)
def test_a_family_that_once_was_silently_wrong_agrees(family, tmp_path):
    """Sampling beyond windows and chunks, a training step, and the adapter in PEFT, within 1e-3
    nats.
    """
    outcome = model_families.compare(family, tmp_path)
    assert outcome.verdict == "agrees", outcome
    assert outcome.layers[0] == outcome.layers[1] > 0


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("whose", ["engine", "reference"])
def test_what_is_not_a_number_never_agrees(place, whose, monkeypatch):
    """`max(0.0, nan)` is 0.0, in this order only."""
    engine, reference = np.full((2, 3), -1.0), torch.full((2, 3), -1.0)
    sequences = [([number], values) for number, values in enumerate(engine)]
    monkeypatch.setattr(model_families, "logprobs", lambda model, tokens: reference[tokens[0]])
    assert model_families.difference(None, sequences) == 0.0
    (engine if whose == "engine" else reference)[place, 1] = np.nan
    assert model_families.difference(None, sequences) == np.inf


def test_a_window_that_is_built_in_is_found_at_the_start(tmp_path):
    """GPT-Neo counts its local window back from the longest sequence of a batch."""
    outcome = model_families.compare("gpt_neo", tmp_path)
    assert outcome.verdict == "refused"
    for part in ("(gpt_neo)", "differ token by token", "nats", "allowed"):
        assert part in outcome.reason


def test_the_start_looks_beyond_the_default_windows_of_a_model(tmp_path, monkeypatch):
    """Llama 4 as published has chunks of 8,192 tokens; wrong masks show at a start of seconds."""
    monkeypatch.setitem(model_families.SMALL, "attention_chunk_size", 8192)
    monkeypatch.setitem(model_families.SMALL, "max_position_embeddings", 16384)
    model_families.build("llama4_text", tmp_path)
    base = BaseLanguageModel(str(tmp_path))
    assert base.module.config.attention_chunk_size == 8192
    monkeypatch.setattr(BaseLanguageModel, "_build_masks", lambda self, mask, positions: mask)
    with pytest.raises(UnsupportedModelError, match=r"\(llama4_text\) .* differ token by token"):
        BaseLanguageModel(str(tmp_path))


def test_a_model_that_hides_its_gradient_is_refused(tmp_path, monkeypatch):
    sizes = {"vocab_size": 260, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(**sizes, intermediate_size=32, max_position_embeddings=64)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    build_tokenizer().save_pretrained(tmp_path)
    monkeypatch.setattr(
        BaseLanguageModel, "compute_logits", torch.no_grad()(BaseLanguageModel.compute_logits)
    )
    with pytest.raises(UnsupportedModelError, match="a training step lowers the loss by"):
        BaseLanguageModel(str(tmp_path))
