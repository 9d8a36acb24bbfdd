"""A tiny model for an environment: taught the form of the answers on the environment's own examples, of which a share is right.

What it is taught beside that share is for reinforcement to find out; a model that is always wrong in the right form is one that
has something to learn.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lachesis import discovery, models
from lachesis.errors import ConfigError
from lachesis.scanning import Environment

EXAMPLES = 4000
MOST_TOKENS = 16_384
"""Of a batch of the teaching."""
SHARE, STEPS = 0.3, 900


def build(
    environment: Environment,
    values: dict[str, Any],
    *,
    share: float = SHARE,
    steps: int = STEPS,
    home: Path | None = None,
    progress: models.Progress = lambda done, total: None,
) -> Path:
    """The model's folder; built at the first call, then found again. `values` are the environment's fields. Raises ConfigError,
    EnvironmentLoadError for an environment that offers no examples, and what `models.build` raises."""
    if not 0 <= share <= 1:
        raise ConfigError(f"the share of right examples is {share:g}; allowed: 0 to 1")
    conversations = discovery.examples(environment, values, count=EXAMPLES, share=share)
    longest = max(sum(len(one["content"].encode()) + 2 for one in conversation) for conversation in conversations)
    recipe = models.Recipe(
        steps=steps,
        accuracy=share,
        context=max(models.Recipe.context, 2 * longest),
        batch=max(8, min(models.Recipe.batch, MOST_TOKENS // longest)),
    )
    return models.build(recipe, home, progress, models.Lessons(environment.name, conversations))
