"""What each step took: seconds per phase, tokens, money, and what the environment could not use."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from lachesis.base.files import write_private
from lachesis.config.prices import Prices, TokenCounts
from lachesis.runs.budgets import TOKEN_KINDS, read_spent_file
from lachesis.runs.environment_counts import read_counts
from lachesis.runs.metrics import MetricsFile
from lachesis.runs.store import RunDir
from lachesis.trainer.usage import Usage

FROM_TALLY = {"rollouts/invalid": "invalid", "rollouts/raised": "raised", "rollouts/dropped": "dropped"}
"""Of the environment's own counts, per step: rollouts without a usable score, groups that raised, and rollouts that it made and
did not send, for their length, their size, or equal scores."""


class Clock:
    """Seconds of the phases of one step."""

    def __init__(self) -> None:
        self._start = self._last = time.monotonic()
        self._laps: dict[str, float] = {}

    def lap(self, name: str) -> None:
        now = time.monotonic()
        self._laps[name], self._last = now - self._last, now

    def since_start(self) -> float:
        return time.monotonic() - self._start

    def metrics(self) -> dict[str, float]:
        return {**{name: round(value, 4) for name, value in self._laps.items()}, "time/step": round(self.since_start(), 4)}


class Ledger:
    """Adds up over all attempts of a run: it goes on from the last line of the metrics."""

    def __init__(self, folder: RunDir, prices: Prices | None) -> None:
        self.prices, self._file, self._folder = prices, folder.spent, folder
        last = (MetricsFile(folder.metrics).tail(3) or [{}])[-1]  # the very last line may be cut off
        before = read_spent_file(self._file)
        self.total = TokenCounts(**{kind: max(last.get(f"tokens/{kind}_total") or 0, before.get(kind) or 0) for kind in TOKEN_KINDS})
        self.cost = max(float(last.get("cost/total") or 0.0), float(before.get("cost") or 0.0))
        self._seen = TokenCounts()
        self._completions = self._truncated = 0
        self._counted = self._tallies()

    def step(self, usage: Usage, seconds: float) -> dict[str, float]:
        """The metrics of one step, whose requests and updates `usage` has counted since the step before."""
        now = usage.tokens()
        new = self._new(now)
        self._seen = now
        self.total = TokenCounts(**{kind: getattr(self.total, kind) + getattr(new, kind) for kind in TOKEN_KINDS})
        found = {f"tokens/{kind}": getattr(new, kind) for kind in TOKEN_KINDS}
        found |= {f"tokens/{kind}_total": getattr(self.total, kind) for kind in TOKEN_KINDS}
        if seconds > 0:
            found |= {f"tokens_per_second/{kind}": round(getattr(new, kind) / seconds, 1) for kind in ("sampled", "trained")}
        if usage.completions > self._completions:
            share = (usage.truncated - self._truncated) / (usage.completions - self._completions)
            found["rollouts/truncated_share"] = round(share, 4)
            self._completions, self._truncated = usage.completions, usage.truncated
        if self.prices is not None:
            money = self.prices.compute_cost(new)
            self.cost += money
            found |= {"cost/step": round(money, 6), "cost/total": round(self.cost, 6)}
        return {**found, **self._environments()}

    def spent(self, usage: Usage) -> dict[str, float | None]:
        """Tokens of all kinds together and US dollars until now, over all attempts, also those since the last step, which may
        never end; money is null without a price."""
        new = self._new(usage.tokens())
        cost = None if self.prices is None else round(self.cost + self.prices.compute_cost(new), 6)
        return {"tokens": self.total.total + new.total, "cost_usd": cost}

    def keep(self, usage: Usage) -> None:
        """Write what was spent until now, for the next attempt. Raises StorageError."""
        new = self._new(usage.tokens())
        total = {kind: getattr(self.total, kind) + getattr(new, kind) for kind in TOKEN_KINDS}
        write_private(self._file, json.dumps({**total, "cost": self.spent(usage)["cost_usd"]}))

    def _new(self, now: TokenCounts) -> TokenCounts:
        return TokenCounts(**{kind: getattr(now, kind) - getattr(self._seen, kind) for kind in TOKEN_KINDS})

    def _environments(self) -> dict[str, float]:
        before, self._counted = self._counted, self._tallies()
        found = dict.fromkeys(FROM_TALLY, 0.0) if self._counted else {}
        for file, counted in self._counted.items():
            earlier = before.get(file, {})
            if counted.get("pid") != earlier.get("pid"):
                earlier = {}  # another process, which counts from zero
            for name, key in FROM_TALLY.items():
                found[name] += float(counted.get(key, 0)) - float(earlier.get(key, 0))
        return found

    def _tallies(self) -> dict[Path, dict[str, Any]]:
        return {file: counted for file in self._folder.counters_files if (counted := read_counts(file)) is not None}
