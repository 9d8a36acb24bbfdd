"""Build a language model that is small enough to learn on a laptop.

It has the Qwen3 architecture and one token per byte, and is fine-tuned on noisy sums or on examples
of another environment. It knows the format of an answer ("12" to "5+7=") and is right about one
time in five; reinforcement learning teaches which answer is right. The result is an ordinary
Hugging Face folder. Nothing is downloaded; the model of the default recipe comes with this package,
and `make tiny-model` trains it anew.
"""

import functools
import hashlib
import json
import os
import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lachesis.base import paths
from lachesis.base.errors import make_embedded_error
from lachesis.base.files import create_folder_atomically, hold_file_lock, storage_errors

USER, ASSISTANT, END_OF_TURN, PAD = "<|user|>", "<|assistant|>", "<|end|>", "<|pad|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ ('<|assistant|>' if message['role'] == 'assistant' else '<|user|>') + message['content'] + "
    "'<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
# Digits at the end of the name of a model's folder; they change with everything that decides its
# weights.
DIGEST_DIGITS = 8
# Holds the folder of the default recipe's model, under the name of that folder.
READY_MADE = Path(__file__).with_name("ready_made")
ProgressCallback = Callable[[int, int], None]
Message = dict[str, Any]
# The label of a token that the loss does not cover, as PyTorch's cross-entropy defines it.
NO_LABEL = -100
# A training sequence: each token with its label.
TokenRow = list[tuple[int, int]]


@dataclass(frozen=True)
class TinyModelRecipe:
    """Hold all that decides the weights; another recipe is another cached model."""

    hidden_size: int = 64
    layers: int = 2
    heads: int = 4
    context: int = 512
    largest: int = 9
    """The largest number in a sum."""
    accuracy: float = 0.2
    """Share of right answers in training; the others are off by 1, 2, 3 or 10."""
    steps: int = 600
    batch: int = 128
    learning_rate: float = 6e-3
    seed: int = 0

    def compute_digest(self) -> str:
        """Return the digits that identify this recipe."""
        return compute_digest(asdict(self))


@dataclass(frozen=True)
class ExampleConversations:
    """Hold conversations to train on instead of sums; `name` becomes part of the folder's name."""

    name: str
    conversations: Sequence[Sequence[Message]]


def get_tiny_model_path(recipe: TinyModelRecipe, home: Path | None = None) -> Path:
    """Return the folder of the model of this recipe, which may not be built yet."""
    return paths.models_dir(home) / f"tiny-{recipe.compute_digest()}"


def ensure_tiny_model(
    recipe: TinyModelRecipe,
    home: Path | None = None,
    progress: ProgressCallback = lambda done, total: None,
    examples: ExampleConversations | None = None,
) -> Path:
    """Return the folder of a model.

    The first call copies the one that comes with this package, or trains it (30 s of one core).

    Args:
        recipe: What decides the weights.
        home: The home folder.
        progress: Called with the number of finished and of all training steps after each step, if
            there are any.
        examples: Conversations to train on instead of sums.

    Raises:
        MissingDependencyError: torch or transformers is not installed.
        StorageError: The disk refused a write.
    """
    target = get_tiny_model_path(recipe, home)
    if examples:
        digest_input = {
            **asdict(recipe),
            "lessons": [list(conversation) for conversation in examples.conversations],
        }
        target = target.with_name(f"tiny-{examples.name}-{compute_digest(digest_input)}")
    if (target / "config.json").is_file():
        return target
    with storage_errors(target):  # Find out before the training whether the disk is writable.
        target.parent.mkdir(parents=True, exist_ok=True)
    # A second process waits here and then finds the model.
    with hold_file_lock(target.parent / f".{target.name}.lock"):
        if not target.exists():
            if (READY_MADE / target.name).is_dir():
                _copy_ready_made(target)
            else:
                train_and_save(recipe, target, progress, examples)
    return target


def compute_digest(digest_input: object) -> str:
    """Return the digits that identify what decides a model's weights, which JSON can hold."""
    return hashlib.sha256(json.dumps(digest_input, sort_keys=True).encode()).hexdigest()[
        :DIGEST_DIGITS
    ]


def _copy_ready_made(target: Path) -> None:
    """Copy what the files hold and not their modes, as an installed package may be read-only."""
    with storage_errors(target), create_folder_atomically(target) as folder:
        for file in sorted((READY_MADE / target.name).iterdir()):
            shutil.copyfile(file, folder / file.name)


def train_and_save(
    recipe: TinyModelRecipe,
    target: Path,
    progress: ProgressCallback = lambda done, total: None,
    examples: ExampleConversations | None = None,
) -> None:
    """Train the model of a recipe and save it as a new folder.

    Raises:
        MissingDependencyError: torch or transformers is not installed.
        StorageError: The disk refused a write.
    """
    try:
        import torch
        import transformers
    except ImportError as error:
        raise make_embedded_error("building a model", str(error.name)) from error
    transformers.utils.logging.disable_progress_bar()
    # PyTorch's threads wait actively: if other work uses all cores, training takes twenty times
    # as long with one thread per core.
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // 2))
    # The caller's random numbers stay as they were.
    with torch.random.fork_rng():
        torch.manual_seed(recipe.seed)
        model = _create_model(recipe)
        _fine_tune_on_examples(model, recipe, progress, examples)
    with storage_errors(target), create_folder_atomically(target) as folder:
        model.save_pretrained(folder)
        build_tokenizer().save_pretrained(folder)


def build_tokenizer() -> Any:
    """Return a tokenizer of bytes and four special tokens; `<|end|>` ends each turn."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    byte_tokenizer = Tokenizer(
        models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[])
    )
    byte_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    byte_tokenizer.decoder = decoders.ByteLevel()
    byte_tokenizer.add_special_tokens([USER, ASSISTANT, END_OF_TURN, PAD])
    return PreTrainedTokenizerFast(
        tokenizer_object=byte_tokenizer,
        eos_token=END_OF_TURN,
        pad_token=PAD,
        additional_special_tokens=[USER, ASSISTANT],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def _create_model(recipe: TinyModelRecipe) -> Any:
    """Return the model of a recipe with random weights."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    byte_tokenizer = build_tokenizer()
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(byte_tokenizer),
            hidden_size=recipe.hidden_size,
            intermediate_size=2 * recipe.hidden_size,
            num_hidden_layers=recipe.layers,
            num_attention_heads=recipe.heads,
            num_key_value_heads=recipe.heads,
            head_dim=recipe.hidden_size // recipe.heads,
            max_position_embeddings=recipe.context,
            tie_word_embeddings=False,
            eos_token_id=byte_tokenizer.eos_token_id,
            pad_token_id=byte_tokenizer.pad_token_id,
            bos_token_id=None,
        )
    )


def _fine_tune_on_examples(
    model: Any,
    recipe: TinyModelRecipe,
    progress: ProgressCallback,
    examples: ExampleConversations | None,
) -> None:
    """Train on noisy answers; the loss covers the answers only."""
    rng = random.Random(recipe.seed)
    encode = functools.cache(build_tokenizer().encode)  # There are a few thousand distinct texts.

    def draw_row() -> TokenRow:
        if examples:
            conversation = rng.choice(examples.conversations)
        else:
            conversation = _draw_sum(rng, recipe)
        return _encode_conversation(conversation, encode)

    fine_tune(model, recipe, draw_row, progress)


def fine_tune(
    model: Any,
    recipe: TinyModelRecipe,
    draw_row: Callable[[], TokenRow],
    progress: ProgressCallback = lambda done, total: None,
) -> None:
    """Train all weights of a causal language model for the steps of a recipe.

    Args:
        model: The model of transformers.
        recipe: Gives the number of steps, the size of a batch and the learning rate.
        draw_row: Returns the next training sequence.
        progress: Called with the number of finished and of all training steps after each step.
    """
    import torch

    optimizer = torch.optim.AdamW(
        model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.98), weight_decay=0.01
    )
    model.train()
    for step in range(recipe.steps):
        learning_rate = (
            recipe.learning_rate * min(1.0, (step + 1) / 50) * max(0.02, 1 - step / recipe.steps)
        )
        for group in optimizer.param_groups:
            group["lr"] = learning_rate
        ids, labels = _build_batch([draw_row() for _ in range(recipe.batch)])
        logits = model(input_ids=ids).logits
        loss = torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        )
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        progress(step + 1, recipe.steps)
    model.eval()


def _draw_sum(rng: random.Random, recipe: TinyModelRecipe) -> Sequence[Message]:
    a, b = rng.randint(0, recipe.largest), rng.randint(0, recipe.largest)
    is_wrong = rng.random() >= recipe.accuracy
    answer = max(0, a + b + (rng.choice([-10, -3, -2, -1, 1, 2, 3, 10]) if is_wrong else 0))
    return [{"role": "user", "content": f"{a}+{b}="}, {"role": "assistant", "content": str(answer)}]


def _encode_conversation(
    conversation: Sequence[Message], encode: Callable[[str], list[int]]
) -> TokenRow:
    """Return the tokens of a conversation, each with its label: only answers are taught."""
    row: TokenRow = []
    for message in conversation:
        is_assistant = message["role"] == "assistant"
        row += [(token, NO_LABEL) for token in encode(ASSISTANT if is_assistant else USER)]
        row += [
            (token, token if is_assistant else NO_LABEL)
            for token in encode(f"{message['content']}{END_OF_TURN}")
        ]
    return row


def _build_batch(rows: Sequence[TokenRow]) -> tuple[Any, Any]:
    """Return token ids and labels (B, T) of rows, padded with token 0 and `NO_LABEL`."""
    import torch

    width = max(map(len, rows))
    ids, labels = (
        torch.zeros(len(rows), width, dtype=torch.long),
        torch.full((len(rows), width), NO_LABEL),
    )
    for index, row in enumerate(rows):
        ids[index, : len(row)], labels[index, : len(row)] = torch.tensor(row).T
    return ids, labels
