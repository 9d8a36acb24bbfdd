"""Compute what a run has used of its budgets, and whether it may continue."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from lachesis.config.run_fields import LimitsSection
from lachesis.runs.folder import RunDir
from lachesis.runs.metrics import MetricsFile
from lachesis.runs.record import RunRecord, get_attempt_duration_s

# Kinds of tokens, each with its own price.
TOKEN_KINDS = ("prefill", "sampled", "trained")


@dataclass(frozen=True)
class Budget:
    """Hold a limit of a run, by its field in the section `limits`, and its used part."""

    field: str
    unit: str
    used: float
    limit: float

    def describe(self) -> str:
        """Return how much of the budget was used, for a sentence."""
        return f"budget: {self.used:,.6g} of {self.limit:,.6g} {self.unit}"

    def propose_limit(self) -> str:
        """Return twice the used amount, as a value of the field."""
        value = 2 * max(self.used, self.limit)
        return str(round(value)) if self.field == "max_tokens" else f"{value:.4g}"


class BudgetUsage(BaseModel):
    """Hold the usage of all attempts of a run.

    Tokens are prefill, sampled and trained together; `cost_usd` is null without a price.
    """

    model_config = ConfigDict(use_attribute_docstrings=True)

    hours: float
    tokens: float
    cost_usd: float | None


def read_spent_file(file: Path) -> dict[str, float]:
    """Return the usage of all attempts when the last attempt ended: tokens by kind, and `cost_usd`
    if known.

    It includes usage after the last step, which the metrics do not. Empty if there is no readable
    file.
    """
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    if isinstance(content, dict):
        return {key: value for key, value in content.items() if isinstance(value, int | float)}
    return {}


def compute_budget_usage(
    record: RunRecord,
    last_line: Mapping[str, Any],
    *,
    live: Mapping[str, Any] | None = None,
    saved: Mapping[str, float] | None = None,
) -> BudgetUsage:
    """Return the usage so far: the maximum of all sources, because usage never decreases.

    Args:
        record: The run.
        last_line: The last line of its metrics.
        live: What the trainer reports now.
        saved: What was written at the end of an attempt; see `read_spent_file`.
    """
    live_values, saved_values = dict(live or {}), dict(saved or {})
    # The newest report may be lost with its process, so all that is known is compared.
    tokens = [
        live_values.get("tokens") or 0,
        sum(last_line.get(f"tokens/{kind}_total") or 0 for kind in TOKEN_KINDS),
        sum(saved_values.get(k, 0) for k in TOKEN_KINDS),
    ]
    costs = [live_values.get("cost_usd"), last_line.get("cost/total"), saved_values.get("cost_usd")]
    known_costs = [cost for cost in costs if cost is not None]
    hours = round(record.earlier_hours + get_attempt_duration_s(record) / 3600, 4)
    if record.usd_per_hour is not None:
        known_costs.append(round(hours * record.usd_per_hour, 4))
    return BudgetUsage(hours=hours, tokens=max(tokens), cost_usd=max(known_costs, default=None))


def read_budget_usage(run_dir: RunDir, record: RunRecord) -> BudgetUsage:
    """Return the usage so far as the files of the run tell it."""
    last_steps = MetricsFile(run_dir.metrics).tail(1)
    last_step = last_steps[-1] if last_steps else {}
    return compute_budget_usage(record, last_step, saved=read_spent_file(run_dir.spent))


def find_exceeded_limit(limits: LimitsSection, spent: BudgetUsage) -> Budget | None:
    """Return the first budget that is used up, or None."""
    for budget in list_budgets(limits, spent):
        if budget.used >= budget.limit:
            return budget
    return None


def compute_budget_shares(limits: LimitsSection, spent: BudgetUsage) -> dict[str, float]:
    """Return the used share of each budget, from 0 on; empty for a run without budgets."""
    return {
        budget.unit: round(budget.used / budget.limit, 4) for budget in list_budgets(limits, spent)
    }


def list_budgets(limits: LimitsSection, spent: BudgetUsage) -> list[Budget]:
    """Return each budget that the run has, with its used part."""
    usage_by_field = {
        ("max_hours", "hours"): spent.hours,
        ("max_tokens", "tokens"): spent.tokens,
        ("max_cost_usd", "US dollars"): spent.cost_usd,
    }
    return [
        Budget(field, unit, used, float(limit))
        for (field, unit), used in usage_by_field.items()
        if used is not None and (limit := getattr(limits, field)) is not None
    ]
