"""Run `model list|show|build|memory`."""

from typing import Annotated, Literal

from cyclopts import Parameter
from rich.console import Group, RenderableType
from rich.text import Text

from lachesis.base import paths
from lachesis.base.argparse_types import LORA_RANK, NUM_STEPS, NUM_TOKENS
from lachesis.base.errors import ModelNotFoundError
from lachesis.cli import terminal
from lachesis.cli.options import DEFAULT_PROFILE, Edits, Output, Profile, number, options_class
from lachesis.cli.terminal import make_lines, make_pairs_table, print_answer
from lachesis.config.launch_spec import LaunchSpec, parse_assignment
from lachesis.config.profiles import check_embedded
from lachesis.inference_tests.store import shorten_model_name
from lachesis.launch.choose_model import resolve_model
from lachesis.operations.launches import (
    ModelList,
    OfferedModel,
    fetch_and_describe,
    list_models,
    resolve_launch,
)
from lachesis.runs.store import RunStore
from lachesis.tiny_model import build, teach

UNKNOWN = "?"


def list_offered_models(*, profile: Profile = DEFAULT_PROFILE, options: Output = Output()) -> None:
    """Print the models of a profile."""
    models = list_models(profile, paths.home())
    print_answer(options, models.to_payload(), _render_models(models))


def show_model(
    name: Annotated[str, Parameter("NAME", help="a name from `lachesis model list`")],
    /,
    *,
    profile: Profile = DEFAULT_PROFILE,
    options: Output = Output(),
) -> None:
    """Print the properties of a model: size, layers, chat template, recommended settings."""
    model = fetch_and_describe(name, profile, paths.home())
    print_answer(options, model.to_payload(), _render_model(model, profile))


def _render_models(models: ModelList) -> RenderableType:
    """Return the models that can be trained as a table: context, prices, thinking and rate."""
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
    """Return all that is known of a model as pairs."""
    price = None
    if model.price is not None:
        price = model.price.describe()
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
            ("learning rate", f"{recommended.learning_rate:g}: {recommended.learning_rate_source}"),
        ]
    )


def build_model(
    *,
    environments: Annotated[
        tuple[str, ...],
        Parameter(
            "--for",
            metavar="ENVIRONMENT",
            help="environment whose examples to pretrain on, instead of sums; may be repeated",
        ),
    ] = (),
    share: Annotated[
        float, Parameter(help="share of those examples that are correct (default: 0.3)")
    ] = 0.3,
    steps: Annotated[int, number(NUM_STEPS, "pretraining steps", default=900)] = 900,
    edits: Edits = (),
    options: Output = Output(),
) -> None:
    """Build a tiny model, which is pretrained on examples of environments if any are named."""
    if not environments:
        with terminal.show_progress_bar("building the tiny model", quiet=options.json) as advance:
            path = build.ensure_tiny_model(build.TinyModelRecipe(), progress=advance)
    else:
        settings = dict(parse_assignment(text) for text in edits)
        launches = [
            resolve_launch(RunStore(), LaunchSpec(environment=name, settings=settings))
            for name in environments
        ]
        taught_environments = [
            (launch.environment, dict(launch.config.env.model_extra or {})) for launch in launches
        ]
        with terminal.show_progress_bar("pretraining a tiny model", quiet=options.json) as advance:
            path = teach.ensure_environment_model(
                *taught_environments, share=share, steps=steps, progress=advance
            )
    terminal.print_answer(options, {"path": str(path)}, f"the model is at {path}")


@options_class
class MemoryOptions(Output):
    """Options of `lachesis model memory`."""

    rank: Annotated[int, number(LORA_RANK, "rank of its adapter", default=32)] = 32
    tokens: Annotated[int, number(NUM_TOKENS, "length of the longest sequence", default=4096)] = (
        4096
    )
    precision: Annotated[
        Literal["auto", "float32", "bfloat16"],
        Parameter(help="type of its weights (default: auto)"),
    ] = "auto"
    base_weights: Annotated[
        Literal["full", "8bit", "4bit"],
        Parameter(help="whether they are stored in fewer bits (default: full)"),
    ] = "full"
    gib: Annotated[
        float | None, Parameter(help="memory of a card that is not here (default: what is free)")
    ] = None


def forecast_memory(
    name: Annotated[str, Parameter("NAME", help="the model, a folder or a Hub name")],
    /,
    *,
    options: MemoryOptions = MemoryOptions(),
) -> int:
    """Print how much of the free memory a model needs; return 1 if it does not fit.

    Raises:
        ConfigError: No model is named.
        ModelNotFoundError: Its configuration cannot be read.
    """
    check_embedded()
    answer = _forecast(options, resolve_model(name, paths.home()))
    text = (
        f"{answer['use']}: at least {answer['needed_gib']:.1f} of {answer['free_gib']:.1f} GiB on "
        f"{answer['device']}"
    )
    print_answer(options, answer, text if answer["fits"] else f"{text}; {answer['advice']}")
    return int(not answer["fits"])


def _forecast(options: MemoryOptions, name: str) -> dict[str, object]:
    """Return how many bytes a model needs for training and sampling, and what fits this machine."""
    # PyTorch and transformers take seconds to load.
    from transformers import AutoConfig

    from lachesis.engine.base_model.device import GIB, describe_device, measure_free_bytes
    from lachesis.engine.base_model.load import LoadSettings
    from lachesis.engine.base_model.memory_plan import compute_needed_bytes, describe_alternatives

    try:
        config = AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ModelNotFoundError(f"the model {name} cannot be read: {reason}") from error
    settings = LoadSettings(
        precision=options.precision,
        base_weights=options.base_weights,
        rank=options.rank,
        sequence_tokens=options.tokens,
    )
    sizes, use = settings.measure(name, config)
    needed_bytes = compute_needed_bytes(sizes, use)
    free_bytes = options.gib * GIB if options.gib else measure_free_bytes(settings.device)
    fits = needed_bytes <= free_bytes
    return {
        "use": str(use),
        "needed_gib": round(needed_bytes / GIB, 4),
        "free_gib": round(free_bytes / GIB, 4),
        "device": "a card" if options.gib else describe_device(settings.device),
        "fits": fits,
        "advice": None if fits else describe_alternatives(sizes, use, free_bytes),
    }
