"""Budgets of a run: what counts as spent, and when one is used up."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lachesis.config.run_fields import LimitsSection
from lachesis.spending.budgets import (
    BudgetUsage,
    compute_budget_shares,
    compute_budget_usage,
    find_exceeded_limit,
    read_spent_file,
)
from tests.harness.home import make_record


def record(**changes):
    return make_record(
        run_id="0123abcd", environment="e", environment_file="e.py", profile="embedded",
        base_model="m", total_steps=9, seed=0,
        wandb_project="p", wandb_run_name="n", **changes,
    )  # fmt: skip


@pytest.mark.parametrize("content", ["", "[1]", "{", "7", "[" * 100_000])
def test_what_cannot_be_read_counts_as_nothing(tmp_path, content):
    file = tmp_path / "spent.json"
    assert read_spent_file(file) == {}
    file.write_text(content)
    assert read_spent_file(file) == {}


def test_what_an_attempt_has_left_is_read(tmp_path):
    file = tmp_path / "spent.json"
    file.write_text(json.dumps({"sampled": 7, "cost_usd": None, "trained": 2.5}))
    assert read_spent_file(file) == {"sampled": 7, "trained": 2.5}


numbers = st.integers(0, 10**9)
costs = st.none() | st.floats(0, 1e6)


@given(numbers, numbers, numbers, st.tuples(costs, costs, costs))
def test_the_most_that_is_known_counts(live, line, end, prices):
    found = compute_budget_usage(
        record(earlier_hours=1.5, attempt_duration_s=1800.0),
        {"tokens/sampled_total": line, "cost/total": prices[1]},
        live={"tokens": live, "cost_usd": prices[0]},
        saved={"sampled": end, **({} if prices[2] is None else {"cost_usd": prices[2]})},
    )
    assert found.hours == 2.0
    assert found.tokens == max(live, line, end)
    assert found.cost_usd == max((price for price in prices if price is not None), default=None)


def test_nothing_is_known_of_a_run_that_has_not_begun():
    assert compute_budget_usage(record(), {}) == BudgetUsage(hours=0.0, tokens=0, cost_usd=None)


@given(st.floats(0.01, 100), st.floats(0, 100))
def test_a_budget_is_used_up_when_its_share_is_one(most, used):
    limits = LimitsSection(max_hours=most)
    seen = BudgetUsage(hours=used, tokens=10**12, cost_usd=None)
    assert (find_exceeded_limit(limits, seen) is not None) == (used >= most)
    assert compute_budget_shares(limits, seen) == {"hours": round(used / most, 4)}


def test_each_budget_has_its_words():
    seen = BudgetUsage(hours=1, tokens=2000, cost_usd=3.5)
    assert find_exceeded_limit(LimitsSection(), seen) is None
    assert compute_budget_shares(LimitsSection(), seen) == {}
    for limits, words in (
        (LimitsSection(max_tokens=2000), "budget: 2,000 of 2,000 tokens"),
        (LimitsSection(max_cost_usd=3), "budget: 3.5 of 3 US dollars"),
    ):
        exceeded = find_exceeded_limit(limits, seen)
        assert exceeded is not None
        assert exceeded.describe() == words
    assert (
        find_exceeded_limit(
            LimitsSection(max_cost_usd=3), BudgetUsage(hours=1, tokens=1, cost_usd=None)
        )
        is None
    )


def test_hours_of_a_back_end_have_a_price():
    """They count where tokens have none, and where they cost more."""
    priced = record().model_copy(update={"usd_per_hour": 4.0, "earlier_hours": 1.5})
    assert compute_budget_usage(priced, {}).cost_usd == 6.0
    assert compute_budget_usage(priced, {"cost/total": 7.5}).cost_usd == 7.5
