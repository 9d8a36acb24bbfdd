"""Teach a tiny model the format of the answers of given environments.

It trains on the environments' own examples, of which a share is right. Which answers are right is
left to reinforcement learning; a model that is always wrong in the right format still has something
to learn.
"""

from pathlib import Path
from typing import Any

from lachesis.base.errors import ConfigError
from lachesis.environment_catalog import lookup
from lachesis.environment_catalog.scan import Environment
from lachesis.tiny_model import build as tiny_model_build

NUM_EXAMPLES = 4000
# Maximum number of tokens in a training batch.
MAX_BATCH_TOKENS = 8_192
RIGHT_SHARE, NUM_STEPS = 0.3, 900


def ensure_environment_model(
    *environments: tuple[Environment, dict[str, Any]],
    share: float = RIGHT_SHARE,
    steps: int = NUM_STEPS,
    home: Path | None = None,
    progress: tiny_model_build.ProgressCallback = lambda done, total: None,
) -> Path:
    """Return the folder of a model for these environments; build it on the first call.

    Args:
        environments: Environments with the values of their fields; each gives equally many
            examples.
        share: The share of right answers, from 0 to 1.
        steps: The number of training steps.
        home: The home folder.
        progress: Called with the number of finished and of all training steps after each step.

    Raises:
        ConfigError: The share is out of range.
        EnvironmentLoadError: An environment cannot make examples.
    """
    if not 0 <= share <= 1:
        raise ConfigError(f"the share of right examples is {share:g}; allowed: 0 to 1")
    num_examples = NUM_EXAMPLES // len(environments)
    conversations = [
        conversation
        for environment_and_values in environments
        for conversation in lookup.collect_examples(
            *environment_and_values, count=num_examples, share=share
        )
    ]
    recipe = _make_recipe(conversations, share, steps)
    name = "-".join(environment.name for environment, _ in environments)
    examples = tiny_model_build.ExampleConversations(name, conversations)
    return tiny_model_build.ensure_tiny_model(recipe, home, progress, examples)


def _make_recipe(
    conversations: list[list[dict[str, Any]]], share: float, steps: int
) -> tiny_model_build.TinyModelRecipe:
    """Return a recipe whose context fits the longest conversation twice."""
    default = tiny_model_build.TinyModelRecipe
    # A token of the tiny model is a byte; each message has two more for its role and its end.
    longest = max(
        sum(len(message["content"].encode()) + 2 for message in conversation)
        for conversation in conversations
    )
    return default(
        steps=steps,
        accuracy=share,
        context=max(default.context, 2 * longest),
        batch=max(8, min(default.batch, MAX_BATCH_TOKENS // longest)),
    )
