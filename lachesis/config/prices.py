"""What tokens cost: `deployments/prices.yaml`, with an operator's own `$LACHESIS_HOME/prices.yaml` over it."""

from __future__ import annotations

import contextlib
from datetime import date
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from lachesis.base import paths
from lachesis.base.errors import ConfigError, MissingDependencyError

PER = 1_000_000


class Tokens(BaseModel):
    """Tokens by what is paid for them. A prompt counts once per request, however many completions are drawn from it."""

    prefill: float = 0
    sampled: float = 0
    trained: float = 0

    @property
    def total(self) -> float:
        return self.prefill + self.sampled + self.trained


class Prices(BaseModel):
    """US dollars per million tokens of one model, and the day on which they were read."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    prefill: float = Field(ge=0, allow_inf_nan=False)
    sample: float = Field(ge=0, allow_inf_nan=False)
    train: float = Field(ge=0, allow_inf_nan=False)
    dated: date

    def cost(self, tokens: Tokens) -> float:
        """US dollars."""
        return (self.prefill * tokens.prefill + self.sample * tokens.sampled + self.train * tokens.trained) / PER


def price_of(model: str, home: Path | None = None) -> Prices | None:
    """The model's prices, or None when no table has them. Raises ConfigError for a table of another shape."""
    for file in _tables(home):
        found = _read(file).get(model)
        if found is not None:
            try:
                return Prices.model_validate(found)
            except ValidationError as error:
                one = error.errors()[0]
                raise ConfigError(f"{file}: {model}.{'.'.join(map(str, one['loc']))}: {one['msg']}") from error
    return None


def _tables(home: Path | None) -> list[Path]:
    own = [(home or paths.home()) / "prices.yaml"]
    with contextlib.suppress(MissingDependencyError):  # an installed package without a checkout has the operator's table only
        own.append(paths.checkout_dir() / "deployments" / "prices.yaml")
    return [file for file in own if file.is_file()]


def _read(file: Path) -> dict[str, Any]:
    try:
        models = (yaml.safe_load(file.read_text(encoding="utf-8")) or {}).get("models") or {}
        if not isinstance(models, dict):
            raise ValueError("`models` is no mapping")
    except (OSError, yaml.YAMLError, AttributeError, ValueError, RecursionError) as error:
        raise ConfigError(f"{file} is not of the form models: {{NAME: {{prefill, sample, train, dated}}}}: {error}") from error
    return models
