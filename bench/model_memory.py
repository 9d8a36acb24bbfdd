"""Forecast the memory of models on cards, by the code that the engine plans with.

    python bench/model_memory.py [--write docs/reference/model-memory.md]

The models are described by their shape, so nothing is downloaded or loaded.
"""

import argparse
from pathlib import Path

import torch
from transformers import Qwen3Config

from lachesis.engine.base_model.device import GIB
from lachesis.engine.base_model.memory_forecast import measure_model_sizes
from lachesis.engine.base_model.memory_plan import ModelUse, compute_needed_bytes

# Width, width of the MLP, layers, heads, heads for keys and values, and whether the head is tied.
SHAPES = {
    "Qwen3-0.6B": (1024, 3072, 28, 16, 8, True),
    "Qwen3-1.7B": (2048, 6144, 28, 16, 8, True),
    "Qwen3-4B": (2560, 9728, 36, 32, 8, True),
    "Qwen3-8B": (4096, 12288, 36, 32, 8, False),
    "Qwen3-14B": (5120, 17408, 40, 40, 8, False),
    "Qwen3-32B": (5120, 25600, 64, 64, 8, False),
}
# Sizes whose forecast was compared with a card; see docs/benchmarks.md.
MEASURED = ("Qwen3-0.6B", "Qwen3-4B", "Qwen3-8B")
CARDS_GIB = (8, 16, 24, 48, 80, 141)
BITS = (None, 8, 4)
RANK, SEQUENCE_TOKENS = 32, 4096
HEAD = f"""# Models and memory

For whoever asks which model fits on which card.

The least memory in GiB that the embedded engine needs, with bfloat16, LoRA of rank {RANK} and
sequences of {SEQUENCE_TOKENS:,} tokens: the weights, the adapter with its optimizer, one sequence
in training whose activations are computed again, and one that is sampled. More memory means more
answers at a time and faster passes. `python bench/model_memory.py` computes this page from the
models' shapes with the code that the engine plans with; `lachesis model memory NAME` does it for
any model.

| model | full | 8 bits | 4 bits | fits in 8 | 16 | 24 | 48 | 80 | 141 GiB |
|---|---|---|---|---|---|---|---|---|---|
"""
TAIL = """
**\\*** The forecast of a pass was compared with a card at this size, full weights, rank 16: it was
0.95 to 1.00 of what was allocated ([Benchmarks](../benchmarks.md#one-gpu-2026-11-27)). The other
rows, and all of 8 and 4 bits, are computed and were not measured. Fewer bits need
`pip install 'lachesis-rl[quantized]'` and `base_weights=8bit` or `4bit`.
"""


def make_config(shape: tuple[int, int, int, int, int, bool]) -> Qwen3Config:
    """Return the configuration of a Qwen3 of this shape."""
    width, mlp_width, layers, heads, kv_heads, is_tied = shape
    return Qwen3Config(
        vocab_size=151_936,
        hidden_size=width,
        intermediate_size=mlp_width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=128,
        tie_word_embeddings=is_tied,
        max_position_embeddings=40_960,
    )


def forecast_gib(name: str, bits: int | None) -> float:
    """Return the least memory of a model in GiB."""
    config = make_config(SHAPES[name])
    sizes = measure_model_sizes(config, rank=RANK, dtype=torch.bfloat16, bits=bits)
    use = ModelUse(name, "bfloat16", RANK, SEQUENCE_TOKENS)
    return compute_needed_bytes(sizes, use) / GIB


def describe_fit(needed_gib: dict[int | None, float], card_gib: int) -> str:
    """Return with how many bits a model fits on a card, the most first."""
    for bits, gib in needed_gib.items():
        if gib <= card_gib:
            return f"{bits} bits" if bits else "full"
    return "–"


def make_row(name: str) -> str:
    """Return the line of a model in the table."""
    needed_gib = {bits: forecast_gib(name, bits) for bits in BITS}
    mark = r"\*" if name in MEASURED else ""
    cells = [name + mark, *(f"{gib:.1f}" for gib in needed_gib.values())]
    cells += [describe_fit(needed_gib, card_gib) for card_gib in CARDS_GIB]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the page")
    args = parser.parse_args()
    rows = [make_row(name) for name in SHAPES]
    page = HEAD + "\n".join(rows) + "\n" + TAIL
    if args.write:
        args.write.write_text(page)
    print(page)


if __name__ == "__main__":
    main()
