"""Budgets of a run: what it has spent, and whether it may go on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from lachesis.config.schema import LimitsSection
from lachesis.runs.store import RunRecord, lasted_s

KINDS = ("prefill", "sampled", "trained")
"""Of tokens, each with its own price."""


class Spent(BaseModel):
    """Over all attempts of a run. Tokens are prefill, sampled and trained together; `cost_usd` is null without a price."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    hours: float
    tokens: float
    cost_usd: float | None


def kept(file: Path) -> dict[str, float]:
    """What an attempt had taken when it ended, over all attempts: tokens per kind, and `cost` where there is a price. It counts
    what came after the last step, which the metrics do not. Empty where nothing was written, or nothing readable."""
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return {key: value for key, value in found.items() if isinstance(value, int | float)} if isinstance(found, dict) else {}


def spent(
    record: RunRecord,
    last: Mapping[str, Any],
    *,
    told: Mapping[str, Any] | None = None,
    at_end: Mapping[str, float] | None = None,
) -> Spent:
    """What a run has taken, the most that is known, because it never becomes less: from the last line of its metrics, from what
    its trainer tells now (`told`), or from what was written `at_end` of an attempt (see `kept`)."""
    now, end = dict(told or {}), dict(at_end or {})
    tokens = [
        now.get("tokens") or 0,
        sum(last.get(f"tokens/{kind}_total") or 0 for kind in KINDS),
        sum(end.get(k, 0) for k in KINDS),
    ]
    costs = [cost for cost in (now.get("cost_usd"), last.get("cost/total"), end.get("cost")) if cost is not None]
    hours = round(record.earlier_hours + lasted_s(record) / 3600, 4)
    return Spent(hours=hours, tokens=max(tokens), cost_usd=max(costs, default=None))


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
