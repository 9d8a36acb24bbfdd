"""Tiny models that stand in for large ones, under their real names in a cache of Hugging Face.

Each has the architecture, the special tokens and the habits of the model that it stands in for. So
whatever loads a model by its name loads a stand-in, by the same code and without a network.
"""

import functools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lachesis.base.files import create_folder_atomically, hold_file_lock
from lachesis.tiny_model.build import (
    NO_LABEL,
    Message,
    TinyModelRecipe,
    TokenRow,
    compute_digest,
    fine_tune,
)
from tests.tinker_cloud import templates

CONTEXT = 1024
REVISION = "0" * 40
# What a thinking model writes before its answer.
THOUGHT = "ok"


@dataclass(frozen=True)
class StandIn:
    """Describe a stand-in: how it loads, and how its turns begin and end."""

    name: str
    architecture: str
    chat_template: str
    special_tokens: tuple[str, ...]
    eos_token: str
    end_tokens: tuple[str, ...]
    """All tokens that end an answer; the first one ends those of this model."""
    pad_token: str
    bos_token: str | None = None
    adds_bos: bool = False
    """Whether encoding any text puts `bos_token` before it."""
    thought: str = ""
    """What the model writes before an answer, unless thinking is switched off."""
    can_switch_thinking: bool = False


_CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>")
STAND_INS = {
    stand_in.name: stand_in
    for stand_in in (
        StandIn(
            "Qwen/Qwen3-8B",
            "qwen3",
            templates.QWEN3_THINKING,
            _CHATML,
            eos_token="<|im_end|>",
            end_tokens=("<|im_end|>", "<|endoftext|>"),
            pad_token="<|endoftext|>",
            thought=f"<think>\n{THOUGHT}\n</think>\n\n",
            can_switch_thinking=True,
        ),
        StandIn(
            "Qwen/Qwen3-4B-Instruct-2507",
            "qwen3",
            templates.QWEN3_INSTRUCT,
            _CHATML,
            eos_token="<|im_end|>",
            end_tokens=("<|im_end|>", "<|endoftext|>"),
            pad_token="<|endoftext|>",
        ),
        StandIn(
            "meta-llama/Llama-3.1-8B-Instruct",
            "llama",
            templates.LLAMA3,
            (
                "<|begin_of_text|>",
                "<|end_of_text|>",
                "<|start_header_id|>",
                "<|end_header_id|>",
                "<|eom_id|>",
                "<|eot_id|>",
            ),
            eos_token="<|eot_id|>",
            end_tokens=("<|eot_id|>", "<|end_of_text|>", "<|eom_id|>"),
            pad_token="<|end_of_text|>",
            bos_token="<|begin_of_text|>",
            adds_bos=True,
        ),
        StandIn(
            "openai/gpt-oss-20b",
            "gpt_oss",
            templates.GPT_OSS,
            (
                "<|startoftext|>",
                "<|endoftext|>",
                "<|return|>",
                "<|call|>",
                "<|start|>",
                "<|channel|>",
                "<|message|>",
                "<|end|>",
            ),
            eos_token="<|return|>",
            end_tokens=("<|return|>", "<|endoftext|>", "<|call|>"),
            pad_token="<|endoftext|>",
            bos_token="<|startoftext|>",
            thought=f"<|channel|>analysis<|message|>{THOUGHT}<|end|><|start|>assistant"
            "<|channel|>final<|message|>",
        ),
    )
}
UNTRAINED = TinyModelRecipe(steps=0, context=CONTEXT)


def ensure_stand_in(
    name: str,
    hf_home: Path,
    conversations: Sequence[Sequence[Message]] = (),
    recipe: TinyModelRecipe = UNTRAINED,
    cache: Path | None = None,
) -> Path:
    """Return the snapshot of a stand-in in the cache of Hugging Face; the first call makes it.

    Args:
        name: The name of the model that it stands in for.
        hf_home: What clients have as `HF_HOME`.
        conversations: What it is trained on, each ending with an answer; may be empty.
        recipe: How it is trained.
        cache: Where trained models are kept for other caches of Hugging Face.
    """
    stand_in = STAND_INS[name]
    model_dir = hf_home / "hub" / f"models--{name.replace('/', '--')}"
    snapshot = model_dir / "snapshots" / REVISION
    digest = compute_digest([repr(stand_in), repr(recipe), list(conversations)])
    kept = (cache or hf_home / "stand_ins") / f"{stand_in.name.replace('/', '--')}-{digest}"
    kept.parent.mkdir(parents=True, exist_ok=True)
    with hold_file_lock(kept.parent / f".{kept.name}.lock"):
        if not kept.exists():
            _make_stand_in(stand_in, kept, conversations, recipe)
    if not snapshot.exists():
        (model_dir / "refs").mkdir(parents=True, exist_ok=True)
        (model_dir / "refs" / "main").write_text(REVISION)
        snapshot.parent.mkdir(exist_ok=True)
        snapshot.symlink_to(kept)
    return snapshot


def build_tokenizer(stand_in: StandIn) -> Any:
    """Return a tokenizer with one token per byte and the special tokens of the stand-in."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(stand_in.special_tokens))
    if stand_in.adds_bos:
        bos = stand_in.bos_token
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=stand_in.bos_token,
        eos_token=stand_in.eos_token,
        pad_token=stand_in.pad_token,
        chat_template=stand_in.chat_template,
        clean_up_tokenization_spaces=False,
    )


def _make_stand_in(
    stand_in: StandIn,
    folder: Path,
    conversations: Sequence[Sequence[Message]],
    recipe: TinyModelRecipe,
) -> None:
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    tokenizer = build_tokenizer(stand_in)
    with torch.random.fork_rng():
        torch.manual_seed(recipe.seed)
        model = _create_model(stand_in, tokenizer, recipe)
        if conversations:
            draw_row = _make_row_source(stand_in, tokenizer, conversations, recipe.seed)
            fine_tune(model, recipe, draw_row)
    ids = [tokenizer.convert_tokens_to_ids(token) for token in stand_in.end_tokens]
    model.generation_config.eos_token_id = ids
    with create_folder_atomically(folder) as temporary:
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)


def _create_model(stand_in: StandIn, tokenizer: Any, recipe: TinyModelRecipe) -> Any:
    import transformers

    values: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": recipe.hidden_size,
        "intermediate_size": 2 * recipe.hidden_size,
        "num_hidden_layers": recipe.layers,
        "num_attention_heads": recipe.heads,
        "num_key_value_heads": recipe.heads,
        "head_dim": recipe.hidden_size // recipe.heads,
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": False,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    if stand_in.architecture == "gpt_oss":
        experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 64}
        no_scaling = {"rope_type": "default", "rope_theta": 10_000.0}
        config = transformers.GptOssConfig(**values, **experts, rope_parameters=no_scaling)
        return transformers.GptOssForCausalLM(config)
    if stand_in.architecture == "llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**values))
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**values))


def _make_row_source(
    stand_in: StandIn, tokenizer: Any, conversations: Sequence[Sequence[Message]], seed: int
) -> Callable[[], TokenRow]:
    """Return a function that draws training sequences, in which only the answers are trained.

    Where thinking can be switched off, it is in half of the sequences.
    """
    rng = random.Random(seed)

    @functools.cache
    def encode(index: int, has_thought: bool) -> TokenRow:
        *prompt, answer = conversations[index]
        options = {}
        if stand_in.can_switch_thinking:
            options["enable_thinking"] = has_thought
        prompt_ids = tokenizer.apply_chat_template(
            list(prompt), add_generation_prompt=True, return_dict=False, **options
        )
        thought = stand_in.thought if has_thought else ""
        end = stand_in.end_tokens[0]
        answer_ids = tokenizer.encode(
            f"{thought}{answer['content']}{end}", add_special_tokens=False
        )
        return [(token, NO_LABEL) for token in prompt_ids] + [
            (token, token) for token in answer_ids
        ]

    def draw_row() -> TokenRow:
        has_thought = bool(stand_in.thought) and (
            not stand_in.can_switch_thinking or rng.random() < 0.5
        )
        return encode(rng.randrange(len(conversations)), has_thought)

    return draw_row


def make_recipe(conversations: Sequence[Sequence[Message]], steps: int) -> TinyModelRecipe:
    """Return a recipe whose batches fit into the memory of a laptop."""
    longest = max(sum(len(message["content"]) for message in turns) for turns in conversations)
    return replace(UNTRAINED, steps=steps, batch=max(16, min(96, 8192 // (longest + 100))))
