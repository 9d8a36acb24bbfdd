"""Budgets of a run: what it has spent, and whether it may go on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict

from lachesis.config import LimitsSection
from lachesis.runs import RunRecord, seconds_between


class Spent(BaseModel):
    """Over all attempts of a run. Tokens are prefill, sampled and trained together; `cost_usd` is null without a price."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    hours: float
    tokens: float
    cost_usd: float | None


def spent(record: RunRecord, last: Mapping[str, Any], told: Mapping[str, Any] | None = None) -> Spent:
    """What a run has taken, from the last line of its metrics, or from what its trainer tells (`told`), which is newer."""
    begun = seconds_between(record.started_at, record.ended_at if record.ended else None) if record.started_at else 0.0
    known = dict(told or {})
    tokens = known.get("tokens") or sum(last.get(f"tokens/{kind}_total") or 0 for kind in ("prefill", "sampled", "trained"))
    cost = known["cost_usd"] if known.get("cost_usd") is not None else last.get("cost/total")
    return Spent(hours=round(record.earlier_hours + begun / 3600, 4), tokens=tokens, cost_usd=cost)


def exceeded(limits: LimitsSection, spent: Spent) -> str | None:
    """The first budget that is used up, in words; None while there is none."""
    for name, used, most in _pairs(limits, spent):
        if used >= most:
            return f"budget: {used:,.6g} of {most:,.6g} {name}"
    return None


def shares(limits: LimitsSection, spent: Spent) -> dict[str, float]:
    """How much of each budget is used, from 0 on; a run without a budget has none."""
    return {name: round(used / most, 4) for name, used, most in _pairs(limits, spent)}


def _pairs(limits: LimitsSection, spent: Spent) -> list[tuple[str, float, float]]:
    known: list[tuple[str, float | None, Any]] = [
        ("hours", spent.hours, limits.max_hours),
        ("tokens", spent.tokens, limits.max_tokens),
        ("US dollars", spent.cost_usd, limits.max_cost_usd),
    ]
    return [(name, used, float(most)) for name, used, most in known if used is not None and most is not None]
