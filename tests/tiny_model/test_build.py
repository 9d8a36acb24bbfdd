"""The tiny model: what it is, and when it is not built."""

import itertools
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from lachesis.base.errors import ConfigError, StorageError
from lachesis.environment_catalog import lookup
from lachesis.tiny_model import build, teach


def test_the_tokenizer_takes_any_text_and_one_token_per_byte():
    tokenizer = build.build_tokenizer()
    assert tokenizer.encode("5+7=") == [tokenizer.encode(char)[0] for char in "5+7="]
    assert tokenizer.decode(tokenizer.encode("héllo ∑\n")) == "héllo ∑\n"
    chat = [{"role": "user", "content": "5+7="}, {"role": "assistant", "content": "12"}]
    assert (
        tokenizer.apply_chat_template(chat, tokenize=False)
        == "<|user|>5+7=<|end|><|assistant|>12<|end|>"
    )


def test_a_recipe_gives_the_same_weights_and_is_built_once(tmp_path):
    recipe = build.TinyModelRecipe(steps=3, batch=4)
    steps: list[int] = []
    one = build.ensure_tiny_model(recipe, tmp_path / "a", lambda done, total: steps.append(done))
    other = build.ensure_tiny_model(recipe, tmp_path / "b")
    assert steps == [1, 2, 3]
    assert (one / "model.safetensors").read_bytes() == (other / "model.safetensors").read_bytes()
    assert (
        build.ensure_tiny_model(recipe, tmp_path / "a", lambda done, total: steps.append(done))
        == one
    )
    assert steps == [1, 2, 3]
    assert (
        build.ensure_tiny_model(build.TinyModelRecipe(steps=3, batch=4, seed=1), tmp_path / "a")
        != one
    )


def test_the_model_of_the_package_is_copied_without_training(tmp_path):
    steps: list[int] = []
    recipe = build.TinyModelRecipe()
    model = build.ensure_tiny_model(recipe, tmp_path, lambda done, total: steps.append(done))
    assert steps == []
    assert model == build.get_tiny_model_path(recipe, tmp_path)
    probabilities = compute_probabilities_of_right_answers(model)
    assert 0.1 < probabilities.mean() < 0.3, "right about one time in five"


@pytest.mark.long
def test_the_model_of_the_package_is_that_of_its_recipe(tmp_path: Path) -> None:
    recipe = build.TinyModelRecipe()
    packaged = build.ensure_tiny_model(recipe, tmp_path)
    build.train_and_save(recipe, tmp_path / "trained")
    difference = compute_probabilities_of_right_answers(
        tmp_path / "trained"
    ) - compute_probabilities_of_right_answers(packaged)
    assert difference.abs().mean() < 0.02


@torch.no_grad()
def compute_probabilities_of_right_answers(folder: Path) -> torch.Tensor:
    """Return the probability of the right answer to each sum of two digits."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    encode = AutoTokenizer.from_pretrained(folder).encode
    probabilities = []
    for a, b in itertools.product(range(10), repeat=2):
        prompt = encode(f"<|user|>{a}+{b}=<|end|><|assistant|>")
        answer = encode(f"{a + b}<|end|>")
        logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        chosen = logits.log_softmax(-1).gather(-1, torch.tensor(answer)[:, None])
        probabilities.append(chosen.sum().exp())
    return torch.stack(probabilities)


def test_it_is_an_ordinary_qwen3_model(random_model):
    assert AutoConfig.from_pretrained(random_model).model_type == "qwen3"
    assert AutoModelForCausalLM.from_pretrained(random_model).config.eos_token_id == 258
    assert AutoTokenizer.from_pretrained(random_model).eos_token == "<|end|>"


def test_a_folder_that_cannot_be_written_is_told_before_the_work(tmp_path):
    (tmp_path / "file").write_text("")
    steps: list[int] = []
    with pytest.raises(StorageError, match="Not a directory"):
        build.ensure_tiny_model(
            build.TinyModelRecipe(), tmp_path / "file", lambda done, total: steps.append(done)
        )
    assert steps == []


CONVERSATION = [
    {"role": "user", "content": "ab"},
    {"role": "assistant", "content": "no"},
    {"role": "tool", "content": "c"},
    {"role": "assistant", "content": "yes"},
]


def test_only_what_the_assistant_says_is_taught():
    """In the form of the chat template."""
    tokenizer = build.build_tokenizer()
    rows = [
        build._encode_conversation(turns, tokenizer.encode)
        for turns in (CONVERSATION, CONVERSATION[:2])
    ]
    ids, labels = build._build_batch(rows)
    assert ids[0].tolist() == tokenizer.apply_chat_template(CONVERSATION, return_dict=False)
    assert (
        tokenizer.decode([token for token in labels[0].tolist() if token != -100])
        == "no<|end|>yes<|end|>"
    )
    assert tokenizer.decode([token for token in labels[1].tolist() if token != -100]) == "no<|end|>"


def test_other_lessons_make_another_model(tmp_path):
    recipe = build.TinyModelRecipe(steps=1, batch=2)
    talk = build.ExampleConversations("talk", [CONVERSATION])
    made = build.ensure_tiny_model(recipe, tmp_path, examples=talk)
    assert made.name.startswith("tiny-talk-")
    assert build.ensure_tiny_model(recipe, tmp_path, examples=talk) == made
    others = {
        build.ensure_tiny_model(recipe, tmp_path),
        build.ensure_tiny_model(
            recipe, tmp_path, examples=build.ExampleConversations("talk", [CONVERSATION[:2]])
        ),
    }
    assert made not in others
    assert len(others) == 2


def test_several_environments_teach_one_model(tmp_path, monkeypatch):
    monkeypatch.setattr(teach, "NUM_EXAMPLES", 40)
    taught = [(lookup.find_environment(name), {}) for name in ("reverse_text", "countdown")]
    made = teach.ensure_environment_model(*taught, steps=1, home=tmp_path)
    assert made.name.startswith("tiny-reverse_text-countdown-")
    assert teach.ensure_environment_model(*reversed(taught), steps=1, home=tmp_path) != made


def test_a_share_that_is_none_is_refused():
    with pytest.raises(ConfigError, match=r"share of right examples is 1\.5; allowed: 0 to 1"):
        teach.ensure_environment_model((lookup.find_environment("reverse_text"), {}), share=1.5)
