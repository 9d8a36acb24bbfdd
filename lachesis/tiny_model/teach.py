"""A tiny model for environments: taught the form of the answers on their own examples, of which a
share is right.

What it is taught beside that share is for reinforcement to find out; a model that is always wrong
in the right form is one that has something to learn.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lachesis.base.errors import ConfigError
from lachesis.catalog import describe
from lachesis.catalog.scan import Environment
from lachesis.tiny_model import build as tiny_model_build

NUM_EXAMPLES = 4000
MAX_BATCH_TOKENS = 8_192
"""Of a batch of the teaching."""
RIGHT_SHARE, NUM_STEPS = 0.3, 900


def ensure_environment_model(
    *environments: tuple[Environment, dict[str, Any]],
    share: float = RIGHT_SHARE,
    steps: int = NUM_STEPS,
    home: Path | None = None,
    progress: tiny_model_build.ProgressCallback = lambda done, total: None,
) -> Path:
    """The model's folder; built at the first call, then found again. `taught` are environments with
    their fields, each of which gives as many examples. Raises ConfigError, EnvironmentLoadError for
    one that has none, and what `models.build` raises.
    """
    if not 0 <= share <= 1:
        raise ConfigError(f"the share of right examples is {share:g}; allowed: 0 to 1")
    num_examples = NUM_EXAMPLES // len(environments)
    conversations = [
        conversation
        for environment_and_values in environments
        for conversation in describe.collect_examples(
            *environment_and_values, count=num_examples, share=share
        )
    ]
    longest = max(
        sum(len(message["content"].encode()) + 2 for message in conversation)
        for conversation in conversations
    )
    recipe = tiny_model_build.TinyModelRecipe(
        steps=steps,
        accuracy=share,
        context=max(tiny_model_build.TinyModelRecipe.context, 2 * longest),
        batch=max(8, min(tiny_model_build.TinyModelRecipe.batch, MAX_BATCH_TOKENS // longest)),
    )
    return tiny_model_build.ensure_tiny_model(
        recipe,
        home,
        progress,
        tiny_model_build.ExampleConversations(
            "-".join(environment.name for environment, _ in environments), conversations
        ),
    )
