"""Compare the engine with transformers and PEFT on the families of models that people train, with
small random weights.

`python bench/model_families.py` plays them and prints a table; `--write FILE` writes the page, and
names play those families alone, which may be any of transformers. Nothing is downloaded. Of each
family the engine

- samples sequences of different lengths, beyond every window and chunk, for the base model and for
  an adapter in one batch; each log-probability is compared with one pass of transformers and PEFT;
- takes one training step; the log-probabilities after it are compared with those of the same step
  in PyTorch and PEFT;
- exports the adapter before and after the step; PEFT loads both.
"""

import argparse
import contextlib
import io
import json
import sys
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import PeftModel
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from lachesis.base.errors import LachesisError
from lachesis.engine.adapter_training import TrainingModel
from lachesis.engine.base_model import lora_layers
from lachesis.engine.base_model.forward_pass import BaseLanguageModel
from lachesis.engine.base_model.lora_layers import LoraAdapter
from lachesis.engine.sampling.admission import SamplingJob
from lachesis.engine.sampling.sampler import Sampler
from lachesis.tinker_server.model_description import LoraSpec
from lachesis.tinker_server.protobuf_messages import DecodedDatum
from lachesis.tinker_server.sample_messages import SampleRequest, SampleResponse
from lachesis.tiny_model.build import build_tokenizer

FAMILIES = (
    "deepseek_v3", "gemma2", "gemma3_text", "glm4_moe", "gpt_oss", "llama", "mistral", "phi3",
    "qwen2", "qwen3", "qwen3_moe", "smollm3",
)  # fmt: skip
LIMIT = 1e-3
"""Nats by which the engine may differ."""
MOST_WEIGHTS = 5_000_000
WINDOW = 8
PROMPTS = ([1, 2, 3], [(7 * at) % 250 for at in range(29)], [200, 100, 50, 25, 12, 6, 3] * 2)
NEW_TOKENS = 14
ADAM = {"learning_rate": 2e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-3}
SMALL = {
    "vocab_size": 260, "hidden_size": 32, "n_embd": 32, "d_model": 32, "dim": 32, "embed_dim": 32,
    "word_embed_proj_dim": 32, "num_hidden_layers": 4, "n_layer": 4, "n_layers": 4,
    "num_layers": 4, "num_decoder_layers": 4, "decoder_layers": 4, "num_attention_heads": 2,
    "n_head": 2, "n_heads": 2, "decoder_attention_heads": 2, "attention_heads": 2,
    "num_key_value_heads": 1, "intermediate_size": 64, "ffn_dim": 64, "decoder_ffn_dim": 64,
    "ffn_hidden_size": 64, "n_inner": 64, "dff": 64, "intermediate_size_mlp": 64,
    "expert_ffn_hidden_size": 32,
    "max_position_embeddings": 128, "n_positions": 128, "n_ctx": 128, "max_seq_len": 128,
    "max_sequence_length": 128, "head_dim": 16, "kv_channels": 16, "attention_head_size": 16,
    "sliding_window": WINDOW, "window_size": WINDOW, "attention_chunk_size": WINDOW,
    "sliding_window_size": WINDOW, "attention_window_size": WINDOW, "rotary_dim": 8,
    "num_experts": 4, "n_routed_experts": 4, "num_local_experts": 4, "moe_num_experts": 4,
    "num_experts_per_tok": 2, "moe_topk": 2, "moe_k": 2, "n_shared_experts": 1,
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
    "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 16, "qk_head_dim": 16, "n_group": 1, "topk_group": 1, "num_expert_group": 1,
    "first_k_dense_replace": 1, "moe_layer_start_index": 1, "decoder_sparse_step": 1,
    "query_pre_attn_scalar": 16, "attention_dropout": 0.0, "dropout": 0.0, "attn_pdrop": 0.0,
    "resid_pdrop": 0.0, "embd_pdrop": 0.0, "hidden_dropout": 0.0, "layerdrop": 0.0,
    "activation_dropout": 0.0, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
    "pad_token_id": 0, "bos_token_id": 256, "eos_token_id": 258,
    "mamba_d_state": 8, "state_size": 8, "conv_kernel": 4, "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 260, "num_kv_shared_layers": 0, "is_decoder": True,
    "use_cache": True, "num_global_key_value_heads": 1, "global_head_dim": 16,
    "index_n_heads": 2, "index_head_dim": 16, "index_topk": 64,
}  # fmt: skip
ALWAYS = {"n_routed_experts", "n_shared_experts", "num_experts", "num_experts_per_tok", "n_group",
          "topk_group", "num_local_experts", "moe_intermediate_size"}  # fmt: skip
"""Set even where the default is None; elsewhere None means that the family can do without."""
OWN: dict[str, dict[str, Any]] = {
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "deepseek_v2": {
        "topk_method": "greedy",
        "scoring_func": "softmax",
        "norm_topk_prob": False,
        "num_key_value_heads": 2,
        "head_dim": 8,
    },
    "deepseek_v3": {"num_key_value_heads": 2, "head_dim": 8},
    "qwen2": {"use_sliding_window": True, "max_window_layers": 2},
    "qwen3": {"use_sliding_window": True, "max_window_layers": 2},
}
"""What a family needs besides, so that its windows are in use."""


@dataclass
class Outcome:
    """How one family fared."""

    family: str
    verdict: str
    """`agrees`, `refused`, `DIFFERS` or `not built`."""
    sampled: float = 0.0
    trained: float = 0.0
    layers: tuple[int, int] = (0, 0)
    """Layers that the engine adapts, and that PEFT loads."""
    reason: str = ""


def build(family: str, folder: Path) -> None:
    """Write a small model with random weights and its tokenizer."""
    defaults = AutoConfig.for_model(family)
    names = {name for name in [*defaults.to_dict(), *defaults.attribute_map] if name in SMALL}
    sizes = {
        name: SMALL[name]
        for name in names
        if getattr(defaults, name, 0) is not None or name in ALWAYS
    }
    sizes |= {name: SMALL[name] for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
    config = AutoConfig.for_model(family, **{**sizes, **OWN.get(family, {})})
    with torch.device("meta"):
        size = sum(
            weight.numel() for weight in AutoModelForCausalLM.from_config(config).parameters()
        )
    if size > MOST_WEIGHTS:
        raise ValueError(f"{size:,} weights at the smallest sizes that this table knows")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    for name, weight in model.named_parameters():
        # Spread out, so that what is attended to shows in the log-probabilities.
        if weight.ndim >= 2:
            torch.nn.init.normal_(weight, std=min(0.5, 2 * weight.shape[-1] ** -0.5))
        elif "bias" in name:
            torch.nn.init.normal_(weight, std=0.1)
    model.save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)


def compare(family: str, folder: Path) -> Outcome:
    """Build a family and compare the engine with transformers and PEFT."""
    try:
        build(family, folder)
        plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        with torch.no_grad():
            assert torch.isfinite(plain(torch.tensor([PROMPTS[0]])).logits).all()
    except Exception as error:
        return Outcome(family, "not built", reason=_line(error))
    try:
        base = BaseLanguageModel(str(folder))
    except LachesisError as error:
        return Outcome(family, "refused", reason=_line(error).replace(str(folder), "FOLDER"))
    try:
        outcome = _compare(family, base, plain, folder)
    except Exception as error:
        return Outcome(family, "DIFFERS", reason=_line(error))
    worst = max(outcome.sampled, outcome.trained)
    agrees = worst <= LIMIT and outcome.layers[0] == outcome.layers[1]
    outcome.verdict = "agrees" if agrees else "DIFFERS"
    return outcome


def _compare(family: str, base: BaseLanguageModel, plain: Any, folder: Path) -> Outcome:
    model = TrainingModel(base, LoraSpec(rank=4, seed=0))
    generator = torch.Generator().manual_seed(1)
    for parameter in lora_layers.iterate_parameters(model.factors):
        parameter.data += 0.02 * torch.randn(parameter.shape, generator=generator)
    before = export(base, model, folder / "before")
    snapshot = model.snapshot()
    sampled = sample(base, [(prompt, which) for prompt in PROMPTS for which in (snapshot, None)])
    data = [DecodedDatum(np.array(tokens[:-1]), {"target_tokens": np.array(tokens[1:])})
            for tokens, _ in sampled]  # fmt: skip
    for _ in model.forward_backward(data, "cross_entropy", {}, forward_only=False):
        pass
    model.optim_step(ADAM)
    after = export(base, model, folder / "after")
    apart = [difference(plain, sampled[1::2])]
    theirs = PeftModel.from_pretrained(plain, str(before), is_trainable=True).eval()
    loaded = {name.removeprefix("base_model.model.").removesuffix(".lora_A.default")
              for name,
              _ in theirs.named_modules() if name.endswith(".lora_A.default")}  # fmt: skip
    apart.append(difference(theirs, sampled[::2]))
    step_with_peft(theirs, [tokens for tokens, _ in sampled])
    trained = [engine_logprobs(base, model, tokens) for tokens, _ in sampled]
    moved = [(tokens, own) for (tokens, _), own in zip(sampled, trained, strict=True)]
    step = difference(theirs, moved)
    fresh = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    step = max(step, difference(PeftModel.from_pretrained(fresh, str(after)).eval(), moved))
    layers = (len(model.factors), len(loaded & set(model.factors)) if loaded else 0)
    extra = len(loaded - set(model.factors))
    return Outcome(family, "", max(apart), step, (layers[0], layers[1] + extra))


def sample(
    base: BaseLanguageModel, jobs: list[tuple[list[int], LoraAdapter | None]]
) -> list[tuple[list[int], np.ndarray]]:
    """Sample all in one batch; the whole sequences and the log-probabilities of their ends."""
    sampler = Sampler(base, seed=0)
    results: dict[int, SampleResponse | Exception] = {}
    for number, (prompt, snapshot) in enumerate(jobs):
        request = SampleRequest(prompt, max_tokens=NEW_TOKENS)
        sampler.add(
            SamplingJob(
                request, snapshot, lambda result, at=number: results.__setitem__(at, result)
            )
        )
    while sampler.is_busy:
        sampler.step()
    sequences = []
    for number, (prompt, _) in enumerate(jobs):
        result = results[number]
        assert isinstance(result, SampleResponse), result
        (own,) = result.sequences
        sequences.append(([*prompt, *own.tokens], np.array(own.logprobs)))
    return sequences


def difference(model: Any, sequences: list[tuple[list[int], np.ndarray]]) -> float:
    """Return the most by which log-probabilities of the sequences' last tokens differ, in nats; one
    that is not a number differs infinitely."""
    apart = []
    for tokens, own in sequences:
        with torch.no_grad():
            values = logprobs(model, tokens)[-len(own) :].numpy()
        apart.append(float(np.abs(values - own).max()))
    return max(apart) if np.isfinite(apart).all() else float("inf")


def logprobs(model: Any, tokens: list[int]) -> torch.Tensor:
    ids = torch.tensor([tokens])
    rows = torch.log_softmax(model(input_ids=ids, use_cache=False).logits[0, :-1].float(), -1)
    return rows.gather(1, ids[0, 1:, None])[:, 0]


def engine_logprobs(base: BaseLanguageModel, model: TrainingModel, tokens: list[int]) -> np.ndarray:
    """Return the log-probabilities of a datum as the engine's `forward` computes them."""
    datum = DecodedDatum(np.array(tokens[:-1]), {"target_tokens": np.array(tokens[1:])})
    passes = model.forward_backward([datum], "cross_entropy", {}, forward_only=True)
    while True:
        try:
            next(passes)
        except StopIteration as end:
            values, _ = end.value
            return np.array(values[0])


def step_with_peft(model: Any, sequences: list[list[int]]) -> None:
    """Take the engine's training step in PyTorch."""
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    loss = -torch.stack([logprobs(model, tokens).sum() for tokens in sequences]).sum()
    loss.backward()
    betas = (ADAM["beta1"], ADAM["beta2"])
    torch.optim.AdamW(
        weights, lr=ADAM["learning_rate"], betas=betas, eps=ADAM["eps"], weight_decay=0.0
    ).step()


def export(base: BaseLanguageModel, model: TrainingModel, folder: Path) -> Path:
    """Write the adapter as a checkpoint of the engine has it."""
    folder.mkdir()
    save_file(lora_layers.to_tensors(model.factors), folder / "adapter_model.safetensors")
    targets = base.lora_layers.find_target_modules(model.factors)
    config = lora_layers.make_peft_config(
        model.spec.rank, targets, base.source, transposed=base.lora_layers.transposed
    )
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def _line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return f"{type(error).__name__}: {text}"[:300]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


PAGE = """# Families of models

For whoever wants to know whether the embedded engine serves a model.

Made by `make families`, with transformers {transformers} and PEFT {peft}, of the families that
people train most; `python bench/model_families.py NAME` compares any other that transformers has. A
family that is not listed may be served too: the engine compares at each start, with the model that
it is to serve, and refuses one that differs.

Each family is built small, with random weights, and served by the embedded engine. Three things are
compared:

- sampled log-probabilities, for the base model and for an adapter in one batch, beyond every window
  and chunk, with one pass of transformers and PEFT;
- the log-probabilities after one training step with those after the same step in PyTorch and PEFT;
- the layers that the engine adapts with those that PEFT loads from the exported adapter.

A family agrees when nothing differs by more than {limit} nats and the layers are the same.
`bench/model_families.py` has the sizes.

Layers that PEFT cannot load for a family are not adapted: in most mixtures of experts it takes
`gate_proj`, `up_proj` and `down_proj` of dense and shared layers for the experts.

| family | verdict | sampled, nats | after a training step, nats | adapted layers (of 4 blocks) |
|---|---|---|---|---|
{rows}
"""


def page(outcomes: list[Outcome]) -> str:
    """Return docs/reference/families.md."""
    rows = [
        f"| `{outcome.family}` | {outcome.verdict} | {outcome.sampled:.0e} | {outcome.trained:.0e} "
        f"| {outcome.layers[0]} |"
        for outcome in outcomes
    ]
    return PAGE.format(
        transformers=version("transformers"),
        peft=version("peft"),
        limit=LIMIT,
        rows="\n".join(rows),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*", help="default: those of the page")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the page")
    args = parser.parse_args()
    torch.set_num_threads(1)
    outcomes = []
    for family in args.families or FAMILIES:
        with tempfile.TemporaryDirectory() as folder, quiet():
            outcome = compare(family, Path(folder))
        outcomes.append(outcome)
        print(
            f"{family:24} {outcome.verdict:10} {outcome.sampled:8.1e} {outcome.trained:8.1e} "
            f"{outcome.layers[0]:3}/{outcome.layers[1]:<3} {outcome.reason}",
            flush=True,
        )
    if args.write:
        args.write.write_text(page(outcomes))
    return int(any(outcome.verdict == "DIFFERS" for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
