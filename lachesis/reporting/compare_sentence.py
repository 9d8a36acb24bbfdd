"""Say in a sentence which of several runs is best, if their held-out results can tell."""

from __future__ import annotations

from collections.abc import Sequence

from lachesis.reporting.comparison import ComparedRun, Comparison, is_behind
from lachesis.reporting.run_filter import LETTERS
from lachesis.web.wording import format_reward, format_setting, join_words

# A sentence with more settings than these is not read to its end.
MAX_NAMED_SETTINGS = 2


def write_compare_lead(comparison: Comparison) -> tuple[str, str]:
    """Return the first sentence of a comparison in two parts, the first of which is bold.

    A run is called best only if the 95 % intervals of its lead over all others lie above 0. Rewards
    are no measure: they are of the items that a run was trained on.
    """
    runs = comparison.runs
    if len({run.record.environment for run in runs}) > 1:
        return "These runs cannot be compared.", "They are on different environments."
    letters = dict(zip((run.record.run_id for run in runs), LETTERS, strict=False))
    evaluated = [run for run in runs if run.held_out is not None]
    if len(evaluated) < 2:
        count = f"{len(evaluated)} of {len(runs)} runs"
        verb = "has" if len(evaluated) == 1 else "have"
        return (
            "None can be called best.",
            f"{count} {verb} a held-out result of trained weights.",
        )
    # Ties keep the order of the address.
    ranked = sorted(evaluated, key=lambda run: -_get_share(run))
    best, rivals = ranked[0], _find_rivals(ranked)
    top = sorted([best, *rivals], key=lambda run: letters[run.record.run_id])
    names = join_words([letters[run.record.run_id] for run in top])
    shares = join_words([format_reward(_get_share(run)) for run in top])
    others = [run for run in ranked if run is not best and run not in rivals]
    rest = " ".join(_describe_other(run, best, comparison, letters) for run in others)
    missing = len(runs) - len(evaluated)
    if missing:
        rest += f" {missing} of the runs {'has' if missing == 1 else 'have'} no held-out result."
    if not rivals:
        return f"{names} is best:", f"{shares} held out, above all others. {rest}".strip()
    items = best.held_out.items if best.held_out else None
    judge = f"{items} items" if items else "their items"
    lead = f"{names} are best, and {judge} cannot tell them apart:"
    return lead, f"{shares} held out, and {_describe_unlike(top, comparison)}. {rest}".strip()


def _get_share(run: ComparedRun) -> float:
    return run.held_out.percent_correct if run.held_out else 0.0


def _find_rivals(ranked: Sequence[ComparedRun]) -> list[ComparedRun]:
    """Return the runs that the held-out items cannot tell from the first, which is the best."""
    best = ranked[0].held_out
    if best is None:
        return []
    return [run for run in ranked[1:] if not is_behind(run.held_out, best)]


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
    run: ComparedRun, best: ComparedRun, comparison: Comparison, letters: dict[str, str]
) -> str:
    """Say how far a run is behind the best one, and what it did otherwise."""
    behind = _get_share(best) - _get_share(run)
    unlike = [
        f"{name} {format_setting(run.summary.settings.get(key))}"
        for name, key in comparison.differing.items()
        if run.summary.settings.get(key) != best.summary.settings.get(key)
    ]
    text = f"{letters[run.record.run_id]} is {behind:.2f} behind"
    if not unlike:
        return f"{text} with the same settings."
    more = len(unlike) - MAX_NAMED_SETTINGS
    shown = join_words(unlike[:MAX_NAMED_SETTINGS])
    return f"{text}, with {shown}{f' and {more} more' if more > 0 else ''}."
