"""Forecasts against numbers worked out by hand; prices; what the code of an environment is."""

import pytest

from lachesis.base.errors import ConfigError, ValidationMissingError
from lachesis.base.timestamps import now_iso
from lachesis.config import run_config as run_config
from lachesis.config.launch_spec import TestSpec
from lachesis.config.prices import Prices, TokenCounts, find_prices
from lachesis.environment_catalog.fingerprint import compute_fingerprint
from lachesis.inference_tests.forecast import (
    GroupUsage,
    PlannedRun,
    compare_with_forecast,
    make_forecast,
    sum_groups,
)
from lachesis.inference_tests.required_test import (
    find_forecast,
    make_planned_run,
    require_validation,
)
from lachesis.inference_tests.store import InferenceRequest, InferenceTestStore
from lachesis.inference_tests.verdict import InferenceCounts, choose_best_word, judge_learnability

PLAN = PlannedRun(total_steps=10, batch_size=16, group_size=8, base_model="m", profile="tinker")
PRICES = Prices(prefill=1.0, sample=2.0, train=3.0, dated="2026-10-07")


def forecast_run(groups, planned, prices, **options):
    """Return the forecast that follows from these groups."""
    sums = sum_groups(groups)
    assert sums is not None
    return make_forecast(sums, planned, prices, **options)


def test_tokens_and_money_by_hand():
    """Two groups of 8 rollouts: a prompt of 80 tokens sent once for all 8, and 160 sampled tokens
    each, half without a signal.
    """
    groups = [
        GroupUsage(
            rollouts=8,
            completions_per_prompt=8,
            prefill=80,
            sampled=160,
            seconds=4,
            has_signal=signal,
        )
        for signal in (True, False)
    ]
    forecast = forecast_run(groups, PLAN, PRICES)
    # per rollout: 10 tokens of prefill, 20 sampled; trained on 80 + 20 when its group has a signal,
    # which half have
    assert forecast.tokens_per_rollout == TokenCounts(prefill=10, sampled=20, trained=50)
    assert forecast.tokens.expected == 160 * 80
    assert forecast.cost_usd is not None
    assert forecast.cost_usd.expected == pytest.approx(
        160 * (10 * 1 + 20 * 2 + 50 * 3) / 1e6, abs=1e-4
    )
    # equal groups: the least width of 20 %; the upper end trains on all groups
    assert (forecast.tokens.low, forecast.tokens.high) == (160 * 64, 160 * 1.2 * 130)
    assert forecast.hours.high == pytest.approx(160 * 0.5 * 2 / 3600, abs=1e-4)


def test_the_pace_of_an_earlier_run_makes_the_time():
    forecast = forecast_run(
        [GroupUsage(rollouts=8, prefill=8, sampled=8, seconds=99)], PLAN, None, step_seconds=36.0
    )
    assert (forecast.hours.low, forecast.hours.expected, forecast.hours.high) == (0.08, 0.1, 0.12)
    assert forecast.cost_usd is None
    assert "no known price of the base model" in forecast.basis
    assert sum_groups([]) is None


def test_a_longer_run_takes_more_and_is_compared_with_what_it_took():
    groups = [GroupUsage(rollouts=8, prefill=80, sampled=160, seconds=4)]
    forecast = forecast_run(groups, PLAN, PRICES)
    longer = forecast_run(groups, PLAN.model_copy(update={"total_steps": 30}), PRICES)
    assert longer.tokens.expected == 3 * forecast.tokens.expected
    half = compare_with_forecast(
        longer,
        steps=15,
        tokens=TokenCounts(sampled=longer.tokens.expected),
        training_hours=longer.hours.expected / 2,
        cost_usd=None,
    )
    assert half["tokens"] == pytest.approx(2.0, abs=0.01)
    assert half["hours"] == pytest.approx(1.0, abs=0.01)
    assert longer.cost_usd is not None
    paid = compare_with_forecast(
        longer,
        steps=30,
        tokens=TokenCounts(),
        training_hours=1.0,
        cost_usd=longer.cost_usd.expected / 2,
    )
    assert paid["cost_usd"] == pytest.approx(0.5, abs=0.01)
    few = compare_with_forecast(
        longer, steps=4, tokens=TokenCounts(), training_hours=1.0, cost_usd=None
    )
    assert few == {}, "the first steps wait for the environment"


def test_smaller_groups_pay_a_shared_prompt_more_often():
    groups = [GroupUsage(rollouts=16, completions_per_prompt=16, prefill=8, sampled=32, seconds=4)]
    forecast = forecast_run(groups, PLAN, PRICES)
    half = forecast_run(
        groups, PLAN.model_copy(update={"group_size": PLAN.group_size // 2}), PRICES
    )
    assert half.tokens_per_rollout.prefill == pytest.approx(
        2 * forecast.tokens_per_rollout.prefill, abs=0.01
    )
    assert half.tokens.expected - forecast.tokens.expected == pytest.approx(
        PLAN.num_rollouts * forecast.tokens_per_rollout.prefill, rel=0.05
    )


def test_prices_come_from_a_table_that_can_be_edited(tmp_path):
    found = find_prices("Qwen/Qwen3-8B", tmp_path)
    assert found is not None
    assert found.dated.year >= 2026
    assert find_prices("somebody/else", tmp_path) is None
    (tmp_path / "prices.yaml").write_text(
        "models: {Qwen/Qwen3-8B: {prefill: 9, sample: 9, train: 9, dated: 2027-01-01}}"
    )
    assert find_prices("Qwen/Qwen3-8B", tmp_path) == Prices(
        prefill=9, sample=9, train=9, dated="2027-01-01"
    )


@pytest.mark.parametrize(
    "content",
    [
        "models: [1]",
        "a: [",
        "models: {m: {prefill: -1, sample: 1, train: 1, dated: 2026-01-01}}",
        "7",
    ],
)
def test_a_wrong_table_is_named(tmp_path, content):
    (tmp_path / "prices.yaml").write_text(content)
    with pytest.raises(ConfigError, match=r"prices\.yaml"):
        find_prices("m", tmp_path)


def test_a_money_budget_needs_a_price(tmp_path, monkeypatch):
    monkeypatch.setenv("LACHESIS_HOME", str(tmp_path))
    paid = run_config.resolve_run_config("e", "tinker", {"limits": {"max_cost_usd": 5}})
    assert paid.prices is not None
    with pytest.raises(ConfigError, match="no price of somebody/else is known"):
        run_config.resolve_run_config(
            "e", "tinker", {"limits": {"max_cost_usd": 5}}, model="somebody/else"
        )


def test_the_fingerprint_follows_local_imports(tmp_path):
    main, helper, other = tmp_path / "env.py", tmp_path / "helper.py", tmp_path / "other.py"
    main.write_text("from helper import f\nimport json\n")
    helper.write_text("f = 1\n")
    other.write_text("g = 1\n")
    first = compute_fingerprint(main)
    other.write_text("g = 2\n")
    assert compute_fingerprint(main) == first
    helper.write_text("f = 2\n")
    assert compute_fingerprint(main) != first


def test_what_is_missing_for_a_run_is_said(tmp_path):
    """In turn: no test, changed code, changed fields, another verdict, an old one; then none."""
    file = tmp_path / "env.py"
    file.write_text("x = 1\n")
    config = run_config.resolve_run_config("e", "embedded", {"env": {"largest": 9}}, model="m")
    planned = make_planned_run(config, starts_from_base=True)
    tests = InferenceTestStore(tmp_path)

    def refused(match):
        with pytest.raises(ValidationMissingError, match=match):
            require_validation(tests, config, {config.environment: str(file)})

    def add(**changes):
        request = InferenceRequest(
            environment="e",
            environment_file=str(file),
            models=["embedded:m"],
            spec=TestSpec(environment="e"),
        )
        own = {
            "fingerprint": compute_fingerprint(file),
            "own_values": config.env.model_extra,
            "planned": planned,
        }
        usage = sum_groups([GroupUsage(rollouts=8, prefill=8, sampled=8, seconds=1)])
        word = changes.pop("verdict", "learnable")
        result_of_model = {
            "model": changes.pop("model", "embedded:m"),
            "verdict": {"word": word, "evidence": ["nothing is right"]},
            "usage": usage and usage.model_dump(mode="json"),
        }
        test = tests.create(request, "", **{**own, **changes})
        result = {"summary": {"verdict": word}, "models_tested": [result_of_model]}
        tests.save(
            test.model_copy(
                update={
                    "status": "completed",
                    "result": result,
                    "ended_at": changes.get("ended_at") or now_iso(),
                }
            )
        )

    refused("it has never been validated")
    add(fingerprint="other")
    refused("before the environment's code was changed")
    add(own_values={"largest": 99})
    refused("was made with other values of largest")
    add(verdict="too hard")
    refused("found it too hard: nothing is right")
    assert find_forecast(tests, config, compute_fingerprint(file), planned) is not None
    add(model="qwen/qwen3-8b")
    refused("was about embedded:m, not about m on profile embedded")
    add(model="tinker:m", planned=planned.model_copy(update={"profile": "tinker"}))
    refused("not about m on profile embedded")
    add(prompt_settings={"thinking": "off", "chat_template_kwargs": {}, "stop_tokens": []})
    refused("was made with other values of thinking")
    add(max_token_length=4096)
    refused("was made with max_token_length 4096, not 128")
    assert find_forecast(tests, config, compute_fingerprint(file), planned) is not None
    add(ended_at="2026-01-01T00:00:00+00:00")
    refused("days old; the limit is 7")
    add()
    assert (
        require_validation(tests, config, {config.environment: str(file)})[0].verdict == "learnable"
    )


def test_a_verdict_says_its_evidence():
    mixed = judge_learnability(
        InferenceCounts(scores_P=[[1.0, 0.0], [0.0, 0.0], [1.0, 1.0]], completions=6, truncated=0)
    )
    assert (mixed.word, mixed.zero_signal_share, mixed.reward_spread) == (
        "learnable",
        0.6667,
        0.1667,
    )
    assert judge_learnability(InferenceCounts(scores_P=[[-1.0, -1.0]])).word == "too hard"
    assert judge_learnability(InferenceCounts(scores_P=[[0.9]])).word == "too easy"
    assert judge_learnability(InferenceCounts(), error="import: boom").evidence == ["import: boom"]
    assert (
        judge_learnability(
            InferenceCounts(scores_P=[[1.0, 0.0]]),
            model_free={"faults": ["the wrong answer scores 1"]},
        ).word
        == "broken"
    )
    assert choose_best_word(["broken", "too hard", "learnable"]) == "learnable"
    assert choose_best_word([]) == "broken"


def test_groups_that_an_environment_leaves_out_have_no_signal():
    """As many environments do with equal rewards; it is no fault, and too many of them leave
    nothing to learn.
    """
    some = judge_learnability(InferenceCounts(scores_P=[[0.0, 1.0]] * 3, empty=3))
    assert (some.word, some.zero_signal_share, some.invalid_rate) == ("learnable", 0.5, 0.0)
    assert "3 groups were dropped by the environment" in " ".join(some.evidence)
    most = judge_learnability(InferenceCounts(scores_P=[[1.0, 1.0, 1.0, 0.0]], empty=15))
    assert (most.word, most.zero_signal_share) == ("too easy", 0.9375)
    none = judge_learnability(InferenceCounts(empty=8))
    assert none.word == "broken"
    assert "solves all of them or none" in none.evidence[0]


def test_evaluations_are_part_of_the_tokens_and_of_the_money():
    """Sampled and not trained on: 13 evaluations of 100 answers are as 1300 rollouts without
    training.
    """
    groups = [GroupUsage(rollouts=8, prefill=80, sampled=160, seconds=1)] * 4
    prices = Prices(prefill=1, sample=10, train=100, dated="2026-10-07")
    without = forecast_run(groups, PLAN, prices)
    evaluated = PLAN.model_copy(update={"evaluations": 13, "evaluation_answers": 100})
    with_them = forecast_run(groups, evaluated, prices)
    assert with_them.tokens.expected - without.tokens.expected == 1300 * (10 + 20)
    assert with_them.cost_usd is not None
    assert without.cost_usd is not None
    assert with_them.cost_usd.expected - without.cost_usd.expected == pytest.approx(
        1300 * (10 + 200) / 1e6, abs=1e-4
    )
    assert with_them.hours == without.hours, "no step waits for them"
    unknown = forecast_run(groups, PLAN.model_copy(update={"evaluations": 3}), None)
    assert "without 3 evaluations, whose size is not known" in unknown.basis


@pytest.mark.parametrize(
    ("every", "final", "count"),
    [(0, False, 0), (0, True, 2), (10, False, 4), (10, True, 4), (7, True, 6), (7, False, 5)],
)
@pytest.mark.parametrize("starts_from_base", [True, False])
def test_the_evaluations_of_a_run_are_counted(every, final, count, starts_from_base):
    """A run that starts from other weights evaluates the base model too, with its last step."""
    edits = {
        "env": {"total_steps": 30, "steps_per_eval": every},
        "tinker": {"final_evaluation": final},
    }
    config = run_config.resolve_run_config("arithmetic", "embedded", edits)
    planned = make_planned_run(config, starts_from_base=starts_from_base)
    assert planned.evaluations == count + int(final and not starts_from_base)


def test_the_advised_test_sets_what_the_run_sets(tmp_path):
    file = tmp_path / "env.py"
    file.write_text("x = 1\n")
    config = run_config.resolve_run_config("e", "tinker", {}, model="Qwen/Qwen3-8B")
    set_fields = {"tinker.thinking": "off", "env.largest": 9}
    with pytest.raises(ValidationMissingError) as raised:
        require_validation(InferenceTestStore(tmp_path), config, {"e": str(file)}, set_fields)
    assert (
        f"`lachesis test {file} --profile tinker --model Qwen/Qwen3-8B --set tinker.thinking=off "
        "--set env.largest=9`" in str(raised.value)
    )
