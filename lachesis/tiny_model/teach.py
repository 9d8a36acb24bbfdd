"""A tiny model for environments: taught the form of the answers on their own examples, of which a share is right.

What it is taught beside that share is for reinforcement to find out; a model that is always wrong in the right form is one that
has something to learn.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lachesis.base.errors import ConfigError
from lachesis.catalog import describe
from lachesis.catalog.scan import Environment
from lachesis.tiny_model import build as models

EXAMPLES = 4000
MOST_TOKENS = 8_192
"""Of a batch of the teaching."""
SHARE, STEPS = 0.3, 900


def build(
    *taught: tuple[Environment, dict[str, Any]],
    share: float = SHARE,
    steps: int = STEPS,
    home: Path | None = None,
    progress: models.Progress = lambda done, total: None,
) -> Path:
    """The model's folder; built at the first call, then found again. `taught` are environments with their fields, each of which
    gives as many examples. Raises ConfigError, EnvironmentLoadError for one that has none, and what `models.build` raises."""
    if not 0 <= share <= 1:
        raise ConfigError(f"the share of right examples is {share:g}; allowed: 0 to 1")
    count = EXAMPLES // len(taught)
    conversations = [one for each in taught for one in describe.collect_examples(*each, count=count, share=share)]
    longest = max(sum(len(one["content"].encode()) + 2 for one in conversation) for conversation in conversations)
    recipe = models.Recipe(
        steps=steps,
        accuracy=share,
        context=max(models.Recipe.context, 2 * longest),
        batch=max(8, min(models.Recipe.batch, MOST_TOKENS // longest)),
    )
    return models.build(recipe, home, progress, models.Lessons("-".join(one.name for one, _ in taught), conversations))
