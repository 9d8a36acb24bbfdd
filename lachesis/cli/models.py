"""Run `lachesis models`: list the models that a profile can train, or describe one."""

from __future__ import annotations

import argparse

from rich.console import Group, RenderableType
from rich.text import Text

from lachesis.base import paths
from lachesis.cli.console import print_answer
from lachesis.cli.layout import make_lines, make_pairs_table
from lachesis.inference_tests.store import shorten_model_name
from lachesis.launch.offered_models import ModelList, OfferedModel, fetch_and_describe, list_models

UNKNOWN = "?"


def handle_models(args: argparse.Namespace) -> None:
    """Print the models of a profile, or one of them."""
    if args.name:
        model = fetch_and_describe(args.name, args.profile, paths.home())
        print_answer(args, model.to_payload(), _render_model(model, args.profile))
        return
    models = list_models(args.profile, paths.home())
    print_answer(args, models.to_payload(), _render_models(models))


def _render_models(models: ModelList) -> RenderableType:
    rows = [["model", "context", "prices", "thinking", "rate"]]
    for model in models.models:
        rows.append(
            [
                shorten_model_name(model.name),
                _format_context(model.max_context_length),
                _format_prices(model),
                _shorten_thinking(model),
                f"{model.recommended.learning_rate:g}",
            ]
        )
    ranks = {model.recommended.lora_rank for model in models.models}
    notes = [
        f"default: {models.default_model}",
        "prices: US dollars per million tokens of prompts, samples and training; rate: the "
        f"recommended learning rate, with LoRA rank {', '.join(map(str, sorted(ranks)))}",
        *models.tips,
    ]
    return Group(*make_lines(rows), Text(), *(Text(note, style="dim") for note in notes))


def _shorten_thinking(model: OfferedModel) -> str:
    """Return one or two words for a narrow column."""
    words = {"does not think": "no", "always thinks": "always", "on or off": "on/off"}
    thinking = model.thinking or UNKNOWN
    return words.get(thinking, "effort" if ":" in thinking else thinking)


def _format_context(tokens: int | None) -> str:
    if tokens is None:
        return UNKNOWN
    if tokens >= 10_000:
        return f"{round(tokens / 1024)}K"
    return str(tokens)


def _format_prices(model: OfferedModel) -> str:
    if model.price is None:
        return "-"
    return f"{model.price.prefill:g} {model.price.sample:g} {model.price.train:g}"


def _render_model(model: OfferedModel, profile: str) -> RenderableType:
    price = None
    if model.price is not None:
        price = (
            f"{model.price.prefill:g} US dollars per million prompt tokens, {model.price.sample:g} "
            f"per million sampled, {model.price.train:g} per million trained ({model.price.dated})"
        )
    elif profile != "embedded":
        price = "not known; add it to $LACHESIS_HOME/prices.yaml"
    recommended = model.recommended
    return make_pairs_table(
        [
            ("model", model.name),
            ("context", model.max_context_length and f"{model.max_context_length} tokens"),
            ("price", price),
            ("renderer", model.renderer or UNKNOWN),
            ("thinking", model.thinking or UNKNOWN),
            ("rank", f"{recommended.lora_rank}: {recommended.lora_rank_source}"),
            (
                "learning rate",
                f"{recommended.learning_rate:g}: {recommended.learning_rate_source}",
            ),
        ]
    )
