"""Examples to imitate: how a file is read, and that a model learns them."""

import json

import pytest

from lachesis.base.errors import ConfigError
from lachesis.config import run_config as run_config
from lachesis.tiny_model import build
from lachesis.trainer.sft_examples import iterate_batches, read_examples
from lachesis.trainer.trained_model import Policy


def written(folder, *lines):
    file = folder / "examples.jsonl"
    file.write_text(
        "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n\n"
    )
    return file


def test_only_the_completion_is_learned(tmp_path):
    tokenizer = build.build_tokenizer()
    messages = [{"role": "user", "content": "2+3="}, {"role": "assistant", "content": "5"}]
    file = written(tmp_path, {"prompt": "2+3=", "completion": "5"}, {"messages": messages})
    one, other = read_examples(file, tokenizer, max_tokens=64)
    assert one.tokens.tolist() == other.tokens.tolist()
    assert tokenizer.decode(one.targets[one.loss_mask]) == "5<|end|>"
    assert tokenizer.decode(one.tokens[: len(one.tokens) - 1]) == "<|user|>2+3=<|end|><|assistant|>"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2, is not an example"),
        ({"prompt": "a"}, "line 2, is not an example"),
        (
            {"messages": [{"role": "user", "content": "a"}]},
            "the last message is not the assistant's",
        ),
        ({"prompt": "a", "completion": 7}, "the completion is not a text"),
        (
            {"prompt": "a" * 70, "completion": "b"},
            "line 2, has 75 tokens, 2 of them to learn; allowed: at most 64",
        ),
    ],
)
def test_a_line_that_is_no_example_is_named(tmp_path, line, message):
    file = written(tmp_path, {"prompt": "a", "completion": "b"}, line)
    with pytest.raises(ConfigError, match=message):
        read_examples(file, build.build_tokenizer(), max_tokens=64)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_examples(tmp_path / "nothing.jsonl", build.build_tokenizer(), max_tokens=64)
    with pytest.raises(ConfigError, match="has no examples"):
        read_examples(written(tmp_path, ""), build.build_tokenizer(), max_tokens=64)


def test_an_epoch_has_every_example_once(tmp_path):
    file = written(tmp_path, *({"prompt": str(number), "completion": "x"} for number in range(7)))
    examples = read_examples(file, build.build_tokenizer(), max_tokens=64)
    found = list(iterate_batches(examples, batch_size=3, epochs=2, seed=1))
    assert [len(one) for one in found] == [3, 3, 1, 3, 3, 1]
    assert {id(one) for batch in found[:3] for one in batch} == {
        id(example) for example in examples
    }


async def test_a_model_learns_the_examples(engine, tmp_path, monkeypatch):
    """The loss is that of a token: a model that knows nothing of 260 tokens begins near ln 260 =
    5.6.
    """
    monkeypatch.setenv("TINKER_BASE_URL", engine.url)
    monkeypatch.setenv("TINKER_API_KEY", engine.token)
    file = written(tmp_path, *({"prompt": f"{a}+1=", "completion": str(a + 1)} for a in range(8)))
    examples = read_examples(file, build.build_tokenizer(), max_tokens=64)
    policy = await Policy.create(
        run_config.resolve_run_config("arithmetic", "embedded", {}, model=engine.model),
        resume_from=None,
    )
    losses = [
        await policy.fine_tune_on_examples(batch, 1e-2)
        for batch in iterate_batches(examples, batch_size=8, epochs=12, seed=0)
    ]
    await policy.close("success")
    assert 4.5 < losses[0] < 7.0
    assert losses[-1] < 0.5 * losses[0]
