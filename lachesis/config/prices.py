"""Look up what tokens cost in `deployments/prices.yaml`.

An operator's own `$LACHESIS_HOME/prices.yaml` takes precedence.
"""

import contextlib
from datetime import date
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from lachesis.base import paths
from lachesis.base.errors import ConfigError, MissingDependencyError

TOKENS_PER_PRICE_UNIT = 1_000_000


class TokenCounts(BaseModel):
    """Count tokens by the way they are priced.

    A prompt counts once per request, however many completions are sampled from it.
    """

    prefill: float = 0
    sampled: float = 0
    trained: float = 0

    @property
    def total(self) -> float:
        return self.prefill + self.sampled + self.trained


class Prices(BaseModel):
    """Hold a model's prices in US dollars per million tokens, and the day they were read."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    prefill: float = Field(ge=0, allow_inf_nan=False)
    sample: float = Field(ge=0, allow_inf_nan=False)
    train: float = Field(ge=0, allow_inf_nan=False)
    dated: date

    def describe(self) -> str:
        """Return the prices in words."""
        return (
            f"{self.prefill:g} US dollars per million prompt tokens, {self.sample:g} per million "
            f"sampled, {self.train:g} per million trained ({self.dated})"
        )

    def compute_cost(self, tokens: TokenCounts) -> float:
        """Return the cost of these tokens in US dollars."""
        return (
            self.prefill * tokens.prefill
            + self.sample * tokens.sampled
            + self.train * tokens.trained
        ) / TOKENS_PER_PRICE_UNIT


def find_prices(model: str, home: Path | None = None) -> Prices | None:
    """Return the prices of a model, or None when no table lists it.

    Raises:
        ConfigError: A price table has the wrong form.
    """
    for file in _list_price_files(home):
        price_fields = _read_price_file(file).get(model)
        if price_fields is not None:
            try:
                return Prices.model_validate(price_fields)
            except ValidationError as error:
                error_detail = error.errors()[0]
                field_path = ".".join(map(str, error_detail["loc"]))
                raise ConfigError(f"{file}: {model}.{field_path}: {error_detail['msg']}") from error
    return None


def find_storage_price(home: Path | None = None) -> float | None:
    """Return the US dollars per gigabyte and month of a kept checkpoint, if a table has them."""
    for file in _list_price_files(home):
        price = _read_table(file).get("storage_usd_per_gb_month")
        if isinstance(price, int | float) and not isinstance(price, bool) and price >= 0:
            return float(price)
    return None


def find_hourly_price(backend: str, home: Path | None = None) -> float | None:
    """Return the US dollars of an hour of a back end, by its name or address, if a table has
    them.

    Raises:
        ConfigError: A price table has the wrong form.
    """
    for file in _list_price_files(home):
        prices = _read_table(file).get("backends") or {}
        if backend not in prices:
            continue
        price = prices[backend]
        if isinstance(price, bool) or not isinstance(price, int | float) or not 0 <= price <= 1e6:
            raise ConfigError(
                f"{file}: backends.{backend} is {price!r}; allowed: US dollars an hour, from 0 to "
                "1,000,000"
            )
        return float(price)
    return None


def _list_price_files(home: Path | None) -> list[Path]:
    candidates = [(home or paths.home()) / "prices.yaml"]
    # Without the project's folder there is only the operator's own table.
    with contextlib.suppress(MissingDependencyError):
        candidates.append(paths.project_dir() / "deployments" / "prices.yaml")
    return [file for file in candidates if file.is_file()]


def _read_price_file(file: Path) -> dict[str, Any]:
    return dict(_read_table(file).get("models") or {})


def _read_table(file: Path) -> dict[str, Any]:
    """Return the content of a price table.

    Raises:
        ConfigError: It has the wrong form.
    """
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
        for name in ("models", "backends"):
            if not isinstance(content.get(name) or {}, dict):
                raise ValueError(f"`{name}` is not a mapping")
    except (OSError, yaml.YAMLError, AttributeError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{file} must have the form models: {{NAME: {{prefill, sample, train, dated}}}}: "
            f"{error}"
        ) from error
    return dict(content)
