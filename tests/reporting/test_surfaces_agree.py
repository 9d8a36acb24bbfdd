"""Every surface says the same of a run: rewards, shares, intervals, cost, forecast, verdict.

The facts are computed here from what the run was made of, by other ways than those of the library,
and each surface is asked in its own words.
"""

import math
import re

import pytest

from lachesis.runs.store import RunStore
from tests.harness.recorded_runs import RECIPES, record_run
from tests.harness.surfaces import SURFACES, Claims, Surfaces

REWARDS = {"first_reward", "last_reward"}
BEFORE = {"before_share", "before_low", "before_high"}
AFTER = {"after_share", "after_low", "after_high"}
ITEMS = {"before_items", "after_items"}
USAGE = {"tokens", "cost"}
FORECAST = {"forecast_tokens", "forecast_time", "forecast_cost"}
WHOLE_RUN = {
    *REWARDS, *BEFORE, *AFTER, "after_items", *USAGE, *FORECAST, "told_apart", "best_checkpoint",
    "verdict", "next_steps",
}  # fmt: skip
RESULTS = {*REWARDS, *BEFORE, *AFTER, *ITEMS, *USAGE, *FORECAST, "best_checkpoint"}
# The facts that each surface says of a run that has them.
SAID_BY = {
    "status": WHOLE_RUN | ITEMS,
    "watch": {"last_reward", *AFTER, "after_items", "verdict"},
    "list": {*REWARDS, *AFTER, "verdict"},
    "page": {*WHOLE_RUN, "curve_point"},
    "report": {*WHOLE_RUN, "curve_point"},
    "csv": {*REWARDS, *AFTER, "after_items", *USAGE, "verdict"},
    "tool": RESULTS,
    "http": RESULTS,
    "artifact": {*REWARDS, *BEFORE, *AFTER, "after_items", "told_apart", "verdict"},
    "card": {*BEFORE, *AFTER, *ITEMS},
}
UNITS = {"k": 1e3, "M": 1e6, "G": 1e9, "thousand": 1e3, "million": 1e6, "billion": 1e9, "%": 0.01,
         "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}  # fmt: skip


def expect(recipe):
    """Return the facts of a run that its recipe has."""
    num_steps = len(recipe.rewards)
    facts: Claims = {"verdict": recipe.verdict, "next_steps": set(list_next_steps(recipe))}
    facts["tokens"] = 6000 * num_steps + recipe.final_tokens
    if num_steps:
        width = max(1, min(5, num_steps // 2))
        facts["first_reward"] = average(recipe.rewards[:width])
        facts["last_reward"] = average(recipe.rewards[-width:])
    if recipe.usd_per_step is not None:
        facts["cost"] = recipe.usd_per_step * num_steps + 1e-6 * recipe.final_tokens
    before = next((result for result in recipe.held_out if result.step == 0), None)
    after = next((result for result in reversed(recipe.held_out) if result.step), None)
    for moment, result in (("before", before), ("after", after)):
        facts |= describe_result(moment, result) if result else {}
    if before and after:
        facts["told_apart"] = are_told_apart(before, after)
    if recipe.forecast:
        for fact, key, factor in (("tokens", "tokens", 1), ("time", "hours", 3600),
                                  ("cost", "cost_usd", 1)):  # fmt: skip
            ends = recipe.forecast[key]
            facts[f"forecast_{fact}"] = (ends["low"] * factor, ends["high"] * factor)
    if best := find_better_checkpoint(recipe):
        facts["best_checkpoint"] = best
    return facts


def average(values):
    present_values = [value for value in values if value is not None]
    return math.fsum(present_values) / len(present_values) if present_values else None


def describe_result(moment, result):
    facts: Claims = {f"{moment}_share": result.share}
    if result.items:
        low, high = solve_score_interval(result.share, result.items)
        facts |= {f"{moment}_low": low, f"{moment}_high": high, f"{moment}_items": result.items}
    return facts


def solve_score_interval(share, items):
    """Return where a true share is 1.96 standard errors away, found by bisection."""

    def is_far(true_share):
        error = math.sqrt(true_share * (1 - true_share) / items)
        return abs(share - true_share) > 1.959963984540054 * error

    ends = []
    for far in (0.0, 1.0):
        near, outer = share, far
        for _ in range(60):
            middle = (near + outer) / 2
            near, outer = (near, middle) if is_far(middle) else (middle, outer)
        ends.append(near)
    return ends[0], ends[1]


def are_told_apart(before, after):
    """Return whether the interval of the difference leaves out 0 (Newcombe's method 10)."""
    low, high = sorted((before, after), key=lambda result: result.share)
    if not low.items or not high.items:
        return False
    below = high.share - solve_score_interval(high.share, high.items)[0]
    above = solve_score_interval(low.share, low.items)[1] - low.share
    return high.share - low.share > math.hypot(below, above)


def find_better_checkpoint(recipe):
    """Return the step of the best checkpoint, if it is not the newest."""
    if not recipe.checkpoints:
        return None
    shares = {result.step: result.share for result in recipe.held_out if result.step}
    scores = {step: shares[step] for step in recipe.checkpoints if step in shares}
    if not scores:
        bounds = zip([0, *recipe.checkpoints], recipe.checkpoints, strict=False)
        scores = {end: average(recipe.rewards[start:end]) or 0 for start, end in bounds}
    best = max(scores, key=lambda step: (scores[step], step))
    return None if best == recipe.checkpoints[-1] else best


def list_next_steps(recipe):
    """List what a person can do with the run after its end."""
    status = recipe.changes.get("status", "completed")
    if status == "failed":
        yield f"lachesis logs {recipe.run_id} trainer"
    if status != "completed":
        yield f"lachesis resume {recipe.run_id}"
    yield f"lachesis report {recipe.run_id}"
    if recipe.checkpoints:
        yield f"lachesis export {recipe.run_id} --to DIR"


def read_number(text):
    """Return a number as it is written, and half a unit of its last digit."""
    match = re.fullmatch(r"([−-]?)\$?([\d,]*\.?\d+(?:e-?\d+)?) ?(\w+|%)?", text.strip())
    assert match, text
    sign, digits, unit = match.groups()
    digits = digits.replace(",", "")
    decimals = len(digits.partition(".")[2].partition("e")[0])
    factor = UNITS[unit] if unit else 1.0
    # A number without decimals that is written with a unit has three digits, as in `158 k`.
    value = float(digits) * factor
    return (-value if sign else value), 0.5 * 10**-decimals * factor


def agrees(said, fact):
    """Return whether what a surface says is the fact, as precisely as it is written."""
    if isinstance(fact, bool | set) or (isinstance(fact, str) and isinstance(said, str)):
        return bool(said == fact)
    if isinstance(fact, tuple):
        parts = said.split(" to ") if isinstance(said, str) else list(said)
        unit = UNITS.get(parts[-1].split()[-1]) if isinstance(parts[-1], str) else None
        if unit and not parts[0].split()[-1].isalpha():
            parts[0] = f"{parts[0]} {parts[-1].split()[-1]}"
        return all(agrees(part, end) for part, end in zip(parts, fact, strict=True))
    if isinstance(said, str):
        value, tolerance = read_number(said)
    else:
        value, tolerance = float(said), 1e-4 * max(1.0, abs(fact))
    return abs(value - fact) <= tolerance * 1.0001


def find_disagreements(recipe, surface, said):
    """Return the facts that a surface leaves out or says otherwise."""
    facts, disagreements = expect(recipe), list[str]()
    if surface == "card" and not recipe.checkpoints:  # There are no weights to push.
        return []
    for fact in sorted(SAID_BY[surface]):
        if fact == "curve_point":
            if recipe.rewards and not is_on_curve(recipe, said.get(fact)):
                disagreements.append(f"{fact}: {said.get(fact)}")
        elif fact not in said and facts.get(fact) not in (None, 0):
            disagreements.append(f"{fact}: not said, but {facts[fact]}")
        elif fact in said and (facts.get(fact) is None or not agrees(said[fact], facts[fact])):
            disagreements.append(f"{fact}: {said[fact]}, not {facts.get(fact)}")
    return disagreements


def is_on_curve(recipe, point):
    """Return whether a point of a curve is the mean of 15 steps around its step."""
    if point is None:
        return False
    step, said = int(point[0]), point[1]
    mean = average(recipe.rewards[max(0, step - 8) : step + 7])
    return mean is not None and abs(said - mean) <= 1e-3 * max(1.0, abs(mean))


@pytest.fixture
def surfaces(clean_environment, tmp_path, monkeypatch):
    return Surfaces(RunStore(clean_environment), tmp_path, monkeypatch)


@pytest.mark.parametrize("kind", RECIPES)
def test_all_surfaces_say_the_same_of_a_run(surfaces, kind):
    recipe = RECIPES[kind]
    record_run(surfaces.store, recipe)
    disagreements = {
        surface: differing
        for surface in SURFACES
        if (differing := find_disagreements(recipe, surface, surfaces.ask(surface, recipe.run_id)))
    }
    assert disagreements == {}
