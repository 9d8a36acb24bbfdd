"""The tiny model: what it is, and when it is not built."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from lachesis import models
from lachesis.errors import StorageError


def test_the_tokenizer_takes_any_text_and_one_token_per_byte() -> None:
    tokenizer = models.tokenizer()
    assert tokenizer.encode("5+7=") == [tokenizer.encode(char)[0] for char in "5+7="]
    assert tokenizer.decode(tokenizer.encode("héllo ∑\n")) == "héllo ∑\n"
    chat = [{"role": "user", "content": "5+7="}, {"role": "assistant", "content": "12"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "<|user|>5+7=<|end|><|assistant|>12<|end|>"


def test_a_recipe_gives_the_same_weights_and_is_built_once(tmp_path: Path) -> None:
    recipe = models.Recipe(steps=3, batch=4)
    steps: list[int] = []
    one = models.build(recipe, tmp_path / "a", lambda done, total: steps.append(done))
    other = models.build(recipe, tmp_path / "b")
    assert steps == [1, 2, 3]
    assert (one / "model.safetensors").read_bytes() == (other / "model.safetensors").read_bytes()
    assert models.build(recipe, tmp_path / "a", lambda done, total: steps.append(done)) == one
    assert steps == [1, 2, 3]
    assert models.build(models.Recipe(steps=3, batch=4, seed=1), tmp_path / "a") != one


def test_it_is_an_ordinary_qwen3_model(random_model: str) -> None:
    assert AutoConfig.from_pretrained(random_model).model_type == "qwen3"
    assert AutoModelForCausalLM.from_pretrained(random_model).config.eos_token_id == 258
    assert AutoTokenizer.from_pretrained(random_model).eos_token == "<|end|>"


def test_a_folder_that_cannot_be_written_is_told_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    steps: list[int] = []
    with pytest.raises(StorageError, match="Not a directory"):
        models.build(models.Recipe(), tmp_path / "file", lambda done, total: steps.append(done))
    assert steps == []
