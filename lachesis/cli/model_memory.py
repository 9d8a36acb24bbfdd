"""Run `lachesis model memory`: forecast what a model needs on this machine's device."""

from __future__ import annotations

import argparse

from lachesis.base import paths
from lachesis.base.errors import ConfigError, ModelNotFoundError
from lachesis.cli.console import print_answer
from lachesis.config.profiles import check_embedded
from lachesis.launch.choose_model import resolve_model


def handle_model_memory(args: argparse.Namespace) -> int:
    """Print how much of the free memory a model needs; return 1 if it does not fit.

    Raises:
        ConfigError: No model is named.
        ModelNotFoundError: Its configuration cannot be read.
    """
    if not args.name:
        raise ConfigError("a model is needed: `lachesis model memory NAME`, a folder or a Hub name")
    check_embedded()
    answer = _forecast(args, resolve_model(args.name, paths.home()))
    text = (
        f"{answer['use']}: at least {answer['needed_gib']:.1f} of {answer['free_gib']:.1f} GiB on "
        f"{answer['device']}"
    )
    print_answer(args, answer, text if answer["fits"] else f"{text}; {answer['advice']}")
    return int(not answer["fits"])


def _forecast(args: argparse.Namespace, name: str) -> dict[str, object]:
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
        precision=args.precision,
        base_weights=args.base_weights,
        rank=args.rank,
        sequence_tokens=args.tokens,
    )
    sizes, use = settings.measure(name, config)
    needed_bytes = compute_needed_bytes(sizes, use)
    free_bytes = args.gib * GIB if args.gib else measure_free_bytes(settings.device)
    fits = needed_bytes <= free_bytes
    return {
        "use": str(use),
        "needed_gib": round(needed_bytes / GIB, 4),
        "free_gib": round(free_bytes / GIB, 4),
        "device": "a card" if args.gib else describe_device(settings.device),
        "fits": fits,
        "advice": None if fits else describe_alternatives(sizes, use, free_bytes),
    }
