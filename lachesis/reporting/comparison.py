"""Compare runs: the settings that differ, rewards, held-out results, and which run is best."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lachesis.base.files import storage_errors
from lachesis.base.formatting import format_reward, format_setting, join_words
from lachesis.base.json_text import Json
from lachesis.reporting.held_out_difference import (
    Difference,
    ItemShares,
    compare_results,
    read_item_shares,
)
from lachesis.reporting.run_list import LETTERS
from lachesis.reporting.run_summary import RunSummary, find_differing_settings
from lachesis.reporting.run_view import RunView
from lachesis.runs.held_out_results import HeldOutPoint, split_curve
from lachesis.runs.metrics import MetricsFile, Step
from lachesis.runs.store import RunStore

if TYPE_CHECKING:
    from lachesis.runs.record import RunRecord


@dataclass(frozen=True)
class ComparedRun:
    """Hold one of the compared runs with its curves."""

    summary: RunSummary
    steps: list[Step]
    curve: list[HeldOutPoint]
    shares: ItemShares = field(default_factory=dict)
    """The share of right answers of trained weights to each held-out item, as kept."""

    @property
    def record(self) -> RunRecord:
        """Return the record of the run."""
        return self.summary.record

    @property
    def label(self) -> str:
        """Return the name of the run with its id, or its id if it has no name."""
        record = self.record
        return f"{record.name} ({record.run_id})" if record.name else record.run_id

    @property
    def held_out(self) -> HeldOutPoint | None:
        """Return the newest held-out result of trained weights."""
        return split_curve(self.curve)[1]


@dataclass(frozen=True)
class Comparison:
    """Hold the compared runs in the order in which they were named."""

    runs: list[ComparedRun]

    @property
    def differing(self) -> dict[str, str]:
        """Return the settings that differ; see `find_differing_settings`."""
        return find_differing_settings([run.summary for run in self.runs])

    @property
    def verdict(self) -> str:
        """Return which run is best, if the held-out items can tell, with the names of the runs."""
        return " ".join(write_compare_lead(self, [run.label for run in self.runs]))

    def to_payload(self) -> Json:
        """Return the comparison as JSON: `runs`, `differing` settings by run, and the `verdict`."""
        return {
            "runs": [
                {
                    **run.summary.to_payload(),
                    "held_out_curve": [point.model_dump() for point in run.curve],
                }
                for run in self.runs
            ],
            "differing": {
                key: {run.record.run_id: run.summary.settings.get(key) for run in self.runs}
                for key in self.differing.values()
            },
            "verdict": self.verdict,
        }


def compare_runs(store: RunStore, records: Sequence[RunRecord]) -> Comparison:
    """Return the comparison of these runs.

    Raises:
        StorageError: The metrics of a run cannot be read.
    """
    compared = []
    for record in records:
        run_dir = store.dir(record.run_id)
        with storage_errors(run_dir.metrics):
            steps = MetricsFile(run_dir.metrics).read()
        compared.append(make_compared_run(RunView(record, run_dir, steps)))
    return Comparison(compared)


def make_compared_run(view: RunView) -> ComparedRun:
    """Return a run as it stands in a comparison."""
    shares = read_item_shares(view.run_dir).get("after", {})
    return ComparedRun(view.summary, view.steps, view.curve, shares)


@dataclass(frozen=True)
class Ranking:
    """Order the runs that have a held-out result of trained weights, the best first.

    A run is the best only if the 95 % intervals of its lead over all others lie above 0. Rewards
    are no measure: they are of the items that a run was trained on.
    """

    best: ComparedRun
    rivals: list[ComparedRun]
    """Those that the items cannot tell from the best."""
    others: list[ComparedRun]


def rank_runs(runs: Sequence[ComparedRun]) -> Ranking | None:
    """Return which run is the best; None if fewer than two can be ranked."""
    evaluated = [run for run in runs if run.held_out is not None]
    if len(evaluated) < 2:
        return None
    # Ties keep the order in which the runs were named.
    best, *others = sorted(evaluated, key=lambda run: -_get_share(run))
    rivals = [run for run in others if not _is_behind(run, best)]
    return Ranking(best, rivals, [run for run in others if run not in rivals])


def find_difference(run: ComparedRun, other: ComparedRun) -> Difference | None:
    """Return the held-out result of a run less that of another; None if one has none."""
    if run.held_out is None or other.held_out is None:
        return None
    return compare_results(other.held_out, run.held_out, other.shares, run.shares)


def _is_behind(run: ComparedRun, best: ComparedRun) -> bool:
    lead = find_difference(best, run)
    return lead is not None and lead.low is not None and lead.low > 0


# A sentence with more settings than these is not read to its end.
MAX_NAMED_SETTINGS = 2


def write_compare_lead(
    comparison: Comparison, run_names: Sequence[str] = LETTERS
) -> tuple[str, str]:
    """Return which run is best in two parts, the first of which is bold.

    Args:
        comparison: The runs.
        run_names: What each of them is called.
    """
    runs = comparison.runs
    if len({run.record.environment for run in runs}) > 1:
        return "These runs cannot be compared.", "They are on different environments."
    names = dict(zip((run.record.run_id for run in runs), run_names, strict=False))
    ranking, num_evaluated = rank_runs(runs), sum(run.held_out is not None for run in runs)
    if ranking is None:
        count = f"{num_evaluated} of {len(runs)} runs"
        verb = "has" if num_evaluated == 1 else "have"
        return ("None can be called best.", f"{count} {verb} a held-out result of trained weights.")
    best, rivals = ranking.best, ranking.rivals
    top = [run for run in runs if run is best or run in rivals]
    best_names = join_words([names[run.record.run_id] for run in top])
    shares = join_words([format_reward(_get_share(run)) for run in top])
    rest = " ".join(_describe_other(run, best, comparison, names) for run in ranking.others)
    missing = len(runs) - num_evaluated
    if missing:
        rest += f" {missing} of the runs {'has' if missing == 1 else 'have'} no held-out result."
    if not rivals:
        return f"{best_names} is best:", f"{shares} held out, above all others. {rest}".strip()
    items = best.held_out.items if best.held_out else None
    judge = f"{items:,} items" if items else "their items"
    lead = f"{best_names} are best, and {judge} cannot tell them apart:"
    return lead, f"{shares} held out, and {_describe_unlike(top, comparison)}. {rest}".strip()


def _get_share(run: ComparedRun) -> float:
    return run.held_out.percent_correct if run.held_out else 0.0


def _describe_unlike(runs: Sequence[ComparedRun], comparison: Comparison) -> str:
    """Say in which settings some runs differ."""
    names = [
        name
        for name, key in comparison.differing.items()
        if len({str(run.summary.settings.get(key)) for run in runs}) > 1
    ]
    if not names:
        return "no setting differs"
    shown = names[:MAX_NAMED_SETTINGS]
    more = len(names) - len(shown)
    if more:
        return f"they differ in {', '.join(shown)} and {more} more settings"
    return f"they differ in {join_words(shown)}"


def _describe_other(
    run: ComparedRun, best: ComparedRun, comparison: Comparison, names: dict[str, str]
) -> str:
    """Describe how far a run is behind the best run, and which settings differ."""
    behind = _get_share(best) - _get_share(run)
    unlike = [
        f"{name} {format_setting(run.summary.settings.get(key))}"
        for name, key in comparison.differing.items()
        if run.summary.settings.get(key) != best.summary.settings.get(key)
    ]
    text = f"{names[run.record.run_id]} is {behind:.2f} behind"
    if not unlike:
        return f"{text} with the same settings."
    more = len(unlike) - MAX_NAMED_SETTINGS
    shown = join_words(unlike[:MAX_NAMED_SETTINGS])
    return f"{text}, with {shown}{f' and {more} more' if more > 0 else ''}."
