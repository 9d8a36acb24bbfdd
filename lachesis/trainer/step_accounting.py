"""Account for each step: seconds per phase, tokens, money, and unusable rollouts."""

import json
import time
from pathlib import Path
from typing import Any

from lachesis.base.files import write_private
from lachesis.config.prices import Prices, TokenCounts
from lachesis.inference_server.token_usage import Usage
from lachesis.runs.environment_counters import read_counts
from lachesis.runs.folder import RunDir
from lachesis.runs.metrics import MetricsFile
from lachesis.spending.budgets import TOKEN_KINDS, read_spent_file

# Metrics from the environments' own counts per step.
#
# These are rollouts without a usable score, groups that raised, and rollouts that were made but not
# sent because of their length, their group's size, or equal scores.
COUNTER_METRICS = {
    "rollouts/invalid": "invalid_rollouts",
    "rollouts/raised": "failed_groups",
    "rollouts/dropped": "dropped_rollouts",
}


class StepTimer:
    """Measure the seconds of the phases of one step."""

    def __init__(self) -> None:
        self._start = self._last = time.monotonic()
        self._laps: dict[str, float] = {}

    def lap(self, name: str) -> None:
        """Record the seconds since the last lap under this name."""
        now = time.monotonic()
        self._laps[name], self._last = now - self._last, now

    def measure_elapsed_s(self) -> float:
        """Return the seconds since the start."""
        return time.monotonic() - self._start

    def to_metrics(self) -> dict[str, float]:
        return {
            **{name: round(value, 4) for name, value in self._laps.items()},
            "time/step": round(self.measure_elapsed_s(), 4),
        }


class StepAccounting:
    """Add up usage over all attempts of a run, continuing from the last line of the metrics."""

    def __init__(self, run_dir: RunDir, prices: Prices | None) -> None:
        self.prices, self._spent_file, self._run_dir = prices, run_dir.spent, run_dir
        # The very last line may be incomplete.
        last_line = (MetricsFile(run_dir.metrics).tail(3) or [{}])[-1]
        saved_spent = read_spent_file(self._spent_file)
        self.total_tokens = TokenCounts(
            **{
                kind: max(last_line.get(f"tokens/{kind}_total") or 0, saved_spent.get(kind) or 0)
                for kind in TOKEN_KINDS
            }
        )
        self.total_cost_usd = max(
            float(last_line.get("cost/total") or 0.0), float(saved_spent.get("cost_usd") or 0.0)
        )
        self._tokens_at_last_step = TokenCounts()
        self._completions_at_last_step = self._truncated_at_last_step = 0
        self._environment_counts = self._read_environment_counts()

    def compute_step_metrics(self, usage: Usage, duration_s: float) -> dict[str, float]:
        """Return the metrics of one step from the requests and updates since the previous step."""
        tokens = usage.count_tokens()
        new_tokens = self._compute_new_tokens(tokens)
        self._tokens_at_last_step = tokens
        self.total_tokens = TokenCounts(
            **{
                kind: getattr(self.total_tokens, kind) + getattr(new_tokens, kind)
                for kind in TOKEN_KINDS
            }
        )
        metrics = {f"tokens/{kind}": getattr(new_tokens, kind) for kind in TOKEN_KINDS}
        metrics |= {
            f"tokens/{kind}_total": getattr(self.total_tokens, kind) for kind in TOKEN_KINDS
        }
        if duration_s > 0:
            metrics |= {
                f"tokens_per_second/{kind}": round(getattr(new_tokens, kind) / duration_s, 1)
                for kind in ("sampled", "trained")
            }
        if usage.completions > self._completions_at_last_step:
            truncated_share = (usage.truncated - self._truncated_at_last_step) / (
                usage.completions - self._completions_at_last_step
            )
            metrics["rollouts/truncated_share"] = round(truncated_share, 4)
            self._completions_at_last_step, self._truncated_at_last_step = (
                usage.completions,
                usage.truncated,
            )
        if self.prices is not None:
            step_cost_usd = self.prices.compute_cost(new_tokens)
            self.total_cost_usd += step_cost_usd
            metrics |= {
                "cost/step": round(step_cost_usd, 6),
                "cost/total": round(self.total_cost_usd, 6),
            }
        return {**metrics, **self._compute_environment_metrics()}

    def compute_spent(self, usage: Usage) -> dict[str, float | None]:
        """Return the tokens and US dollars of all attempts until now; dollars are null without a
        price.

        Usage since the last step is included, because that step may never end.
        """
        new_tokens = self._compute_new_tokens(usage.count_tokens())
        if self.prices is None:
            cost_usd = None
        else:
            cost_usd = round(self.total_cost_usd + self.prices.compute_cost(new_tokens), 6)
        return {"tokens": self.total_tokens.total + new_tokens.total, "cost_usd": cost_usd}

    def write_spent(self, usage: Usage) -> None:
        """Write the usage until now for the next attempt.

        Raises:
            StorageError: The file cannot be written.
        """
        new_tokens = self._compute_new_tokens(usage.count_tokens())
        tokens_by_kind = {
            kind: getattr(self.total_tokens, kind) + getattr(new_tokens, kind)
            for kind in TOKEN_KINDS
        }
        write_private(
            self._spent_file,
            json.dumps({**tokens_by_kind, "cost_usd": self.compute_spent(usage)["cost_usd"]}),
        )

    def _compute_new_tokens(self, tokens: TokenCounts) -> TokenCounts:
        return TokenCounts(
            **{
                kind: getattr(tokens, kind) - getattr(self._tokens_at_last_step, kind)
                for kind in TOKEN_KINDS
            }
        )

    def _compute_environment_metrics(self) -> dict[str, float]:
        """Return what environments have counted since the step before."""
        counts_before, self._environment_counts = (
            self._environment_counts,
            self._read_environment_counts(),
        )
        if self._environment_counts:
            metrics = dict.fromkeys(COUNTER_METRICS, 0.0)
        else:
            metrics = {}
        for file, counts in self._environment_counts.items():
            earlier_counts = counts_before.get(file, {})
            if counts.get("pid") != earlier_counts.get("pid"):
                earlier_counts = {}  # The environment was restarted and counts from zero.
            for name, key in COUNTER_METRICS.items():
                metrics[name] += float(counts.get(key, 0)) - float(earlier_counts.get(key, 0))
        return metrics

    def _read_environment_counts(self) -> dict[Path, dict[str, Any]]:
        return {
            file: counts
            for file in self._run_dir.counters_files
            if (counts := read_counts(file)) is not None
        }
