"""What the numbers of a run say about learning."""

import random
from typing import Any

import pytest

from lachesis.monitor.learning_rules import judge_learning
from lachesis.monitor.reward_trend import WINDOW, Trend
from lachesis.monitor.run_history import SEVERITY, RunFacts

Step = dict[str, Any]


def healthy(count=60, seed=0, **fixed):
    """A run whose reward rises from 0.2 to 0.8."""
    rng = random.Random(seed)
    return [
        {
            "step": number,
            "reward/mean": 0.2 + 0.6 * number / count + rng.uniform(-0.08, 0.08),
            "batch/zero_signal_share": rng.choice([0.0, 0.0, 0.125, 0.25]),
            "batch/rollouts": 128,
            "rollouts/invalid": 0,
            "train/loss": rng.uniform(-0.01, 0.01),
            "logprobs/gap": rng.uniform(0.0, 0.08),
            "entropy/sampling": 1.0 - 0.8 * number / count,
            "length/mean": 2.5,
            "rollouts/truncated_share": 0.0,
            "weights/change": rng.uniform(0.02, 0.2),
            "train/learning_rate": 1e-3,
            **fixed,
        }
        for number in range(1, count + 1)
    ]


@pytest.mark.parametrize("seed", range(5))
def test_a_run_that_learns_is_healthy_at_every_step(seed):
    steps, facts = healthy(300, seed), RunFacts(total_steps=300)
    assert {judge_learning(steps[:end], facts=facts).word for end in range(5)} == {"too early"}
    assert {judge_learning(steps[:end], facts=facts).word for end in range(5, 301)} == {"healthy"}


def test_a_solved_task_is_no_fault():
    solved = {
        "reward/mean": 1.0,
        "batch/zero_signal_share": 1.0,
        "entropy/sampling": 0.0,
        "weights/change": None,
    }
    assert (
        judge_learning(
            healthy(100) + [{**step, **solved, "step": 100 + step["step"]} for step in healthy(60)]
        ).word
        == "healthy"
    )


@pytest.mark.parametrize(
    ("fault", "word", "said"),
    [
        (
            {"weights/change": 0.0},
            "broken",
            "the sampled weights have not changed in the last 20 updates",
        ),
        (
            {"train/loss": None},
            "broken",
            "the loss was not a finite number in 5 of the last 5 steps",
        ),
        (
            {"batch/zero_signal_share": 1.0, "reward/mean": 0.0},
            "broken",
            "100% of the groups of the last 20 steps",
        ),
        ({"batch/zero_signal_share": 0.95, "reward/mean": 0.1}, "suspect", "hardly any gradient"),
        ({"logprobs/gap": 1.7}, "broken", "differ by 1.70 nats per token"),
        ({"logprobs/gap": 0.4}, "suspect", "differ by 0.40 nats per token"),
        (
            {"rollouts/invalid": 1024},
            "broken",
            "89% of the rollouts of the last 20 steps had no usable score",
        ),
        (
            {"rollouts/invalid": 64},
            "suspect",
            "33% of the rollouts of the last 20 steps had no usable score, since step 61",
        ),
        (
            {"environments/b/reward_mean": 0.0},
            "suspect",
            "no rollout of b was worth more than 0 in the last 20 steps",
        ),
        ({"reward/mean": 0.05}, "suspect", "the mean reward fell from"),
        ({"entropy/sampling": 0.001, "reward/mean": 0.1}, "suspect", "it tries nothing new"),
        ({"length/mean": 60.0}, "suspect", "completions went from"),
        ({"rollouts/truncated_share": 0.7}, "suspect", "70% of the completions are cut off"),
    ],
)
def test_each_fault_is_named_within_twenty_steps(fault, word, said):
    before = healthy(60)
    ill = [{**step, **fault, "step": 60 + step["step"]} for step in healthy(WINDOW, 1)]
    found = judge_learning(before + ill)
    assert found.word == word
    assert any(said in sentence for sentence in found.evidence), found.evidence
    assert 0 < len(found.advice) <= len(found.evidence)


def test_the_gravest_comes_first():
    found = judge_learning(healthy(60, **{"rollouts/truncated_share": 0.9, "weights/change": 0.0}))
    assert found.word == "broken"
    assert "weights" in found.evidence[0]
    assert "cut off" in found.evidence[1]


def test_a_few_steps_are_too_few():
    few = judge_learning(healthy(60, **{"weights/change": 0.0})[:4])
    assert (few.word, few.evidence) == ("too early", ["4 of at least 5 steps"])


def test_slow_changes_are_seen_against_the_start_and_the_best():
    """A tick reads only the last sixty steps of a long run."""
    slow = healthy(600, **{"reward/mean": None})
    for step in slow:
        step["reward/mean"] = 0.8 - 0.4 * step["step"] / 600
        step["length/mean"] = 2.0 + 6.0 * step["step"] / 600
    trend = Trend()
    trend.add(slow)
    health = judge_learning(slow[-60:], first_steps=slow[:20], trend=trend)
    assert health.word == "suspect"
    assert "the mean reward fell from 0.793 around step 20 to" in " ".join(health.evidence)
    assert "completions went from 2 to 8 tokens" in " ".join(health.evidence)


def test_a_task_whose_best_reward_is_small_can_be_solved():
    """No gradient is left and the reward has risen: worth a look, and no fault."""
    solved = {"reward/mean": 0.5, "batch/zero_signal_share": 1.0}
    course = healthy(40, **{"reward/mean": 0.1}) + healthy(30, **solved)
    assert judge_learning(course[-60:], first_steps=course[:20]).word == "suspect"


def silent(count, batch=32, **fixed):
    """Steps whose groups all have equal rewards."""
    found = healthy(
        count,
        **{"batch/zero_signal_share": 1.0, "reward/mean": 0.0, "batch/rollouts": batch, **fixed},
    )
    for step in found:
        del step["weights/change"]
    return found


def test_no_signal_from_the_start_is_broken_only_after_thousands_of_rollouts():
    """A late take-off begins with a success in a thousand rollouts; until then it may not be
    stopped.
    """
    assert judge_learning(silent(4)).word == "too early"
    assert judge_learning(silent(5)).word == "suspect"
    assert judge_learning(silent(156)).word == "suspect"
    assert judge_learning(silent(157)).word == "broken"
    assert "0.000: no gradient" in judge_learning(silent(157)).evidence[0]
    assert judge_learning(silent(30, **{"reward/mean": 0.95})).word == "healthy"


def test_one_signal_begins_the_count_anew():
    steps = silent(300)
    steps[-30]["batch/zero_signal_share"] = 0.9
    assert judge_learning(steps).word == "suspect"


def test_an_environment_that_sends_hardly_anything_is_suspect():
    health = judge_learning(healthy(30, **{"rollouts/dropped": 128 * 30}))
    assert (health.word, len(health.evidence)) == ("suspect", 1)
    assert "left out 97% of the rollouts" in health.evidence[0]


@pytest.mark.parametrize(
    ("counts", "ended", "word", "evidence"),
    [
        ({}, False, "too early", "0 of at least 5 steps"),
        (
            {"invalid_rollouts": 5, "errors": {"E: x": 5}},
            False,
            "too early",
            "5 rollouts had no usable score (E: x, 5 times)",
        ),
        ({"invalid_rollouts": 95}, False, "too early", "95 rollouts had no usable score"),
        ({"invalid_rollouts": 96}, False, "broken", "100% of 96 rollouts had no usable score"),
        ({"invalid_rollouts": 96, "rollouts": 25}, False, "too early", "96 rollouts"),
        ({"invalid_rollouts": 96}, True, "broken", "100% of 96 rollouts had no usable score"),
        ({"dropped_rollouts": 95}, False, "too early", "0 of at least 5 steps"),
        (
            {"dropped_rollouts": 96},
            False,
            "suspect",
            "has left out 96 rollouts, which make 3 batches",
        ),
        ({}, True, "unknown", "it failed after 0 of at least 5 steps"),
    ],
)
def test_before_the_first_steps_the_environment_is_judged(counts, ended, word, evidence):
    facts = RunFacts(
        batch_size=32,
        environment_counts=counts,
        has_ended=ended,
        status="failed" if ended else "running",
        error="E: y\nz",
    )
    health = judge_learning([], facts=facts)
    assert health.word == word
    assert evidence in health.evidence[0]
    assert health.evidence[1:] == (["E: y"] if word == "unknown" else [])


def test_no_finding_without_a_batch_size():
    assert (
        judge_learning(
            [],
            facts=RunFacts(environment_counts={"invalid_rollouts": 1000, "dropped_rollouts": 1000}),
        ).word
        == "too early"
    )


def test_numbers_that_are_missing_are_no_sign():
    assert judge_learning([{"step": number} for number in range(1, 60)]).evidence == [
        "nothing unusual"
    ]


def flat(count, level, seed=0, spread=0.03):
    rng = random.Random(seed)
    return [
        {"step": number, "reward/mean": level + rng.gauss(0, spread)}
        for number in range(1, count + 1)
    ]


def test_a_reward_that_stays_is_not_learning_between_the_first_tenth_and_the_half():
    steps, facts = flat(1000, 0.4), RunFacts(total_steps=1000)
    words = {end: judge_learning(steps[:end], facts=facts).word for end in range(5, 1001, 5)}
    assert {word for end, word in words.items() if end <= 100} == {"healthy"}
    assert words[495] == "not learning"
    health = judge_learning(steps[:500], facts=facts)
    assert "the mean reward has not risen in 500 steps" in health.evidence[0]
    assert judge_learning(steps[:500]).word == "healthy", (
        "without the number of all steps nothing is said"
    )


def test_an_exact_standstill_is_seen_before_the_half():
    """Without noise no large rise agrees with the steps."""
    steps = flat(1000, 0.4, spread=0.0)
    assert judge_learning(steps[:150], facts=RunFacts(total_steps=1000)).word == "not learning"


def test_a_plateau_after_a_rise_is_healthy():
    steps = flat(40, 0.2) + [{**step, "step": 40 + step["step"]} for step in flat(1960, 0.6)]
    facts, trend = RunFacts(total_steps=2000), Trend()
    words = set()
    for end in range(20, 2001, 20):
        trend.add(steps[end - 20 : end])
        words.add(
            judge_learning(
                steps[max(0, end - 60) : end], first_steps=steps[:20], trend=trend, facts=facts
            ).word
        )
    assert words == {"healthy"}
    assert trend.risen_at is not None


def with_held_out(rewards, shares, half=0.02):
    """Twenty steps per held-out result, whose reward stays near that of its number."""
    steps: list[Step] = []
    rng = random.Random(0)
    for reward, share in zip(rewards, shares, strict=True):
        steps += [
            {"step": len(steps) + 1 + at, "reward/mean": reward + rng.gauss(0, 0.01)}
            for at in range(20)
        ]
        known = {
            "percent_correct": share,
            "low": share - half,
            "high": share + half,
            "items": 500,
            "step": len(steps) - 1,
        }
        steps[-1] |= {f"eval/{name}": value for name, value in known.items()}
    return steps


@pytest.mark.parametrize(
    ("rewards", "shares", "half", "evidence"),
    [
        (
            [0.2, 0.4, 0.6, 0.8],
            [0.3, 0.35, 0.3, 0.2],
            0.02,
            "while the held-out result fell from 30.0% to 20.0%",
        ),
        ([0.2, 0.25, 0.3, 0.35], [0.5, 0.52, 0.5, 0.45], 0.2, None),
        (
            [0.2, 0.3, 0.5, 0.8],
            [0.2, 0.3, 0.32, 0.33],
            0.02,
            "the gap between training and held-out results has grown by 0.4",
        ),
        ([0.2, 0.4, 0.6, 0.8], [0.2, 0.4, 0.6, 0.78], 0.02, None),
        ([0.3, 0.7, 0.9, 0.98], [0.34, 0.68, 0.7, 0.83], 0.02, None),
        ([0.1, 0.2, 0.3, 0.4], [0.9, 0.9, 0.9, 0.9], 0.02, None),
        ([2.0, 3.0, 4.0, 8.0], [0.2, 0.2, 0.2, 0.2], 0.02, None),
        ([0.2, 0.5, 0.8], [0.3, 0.2, 0.1], 0.02, None),
    ],
    ids=[
        "falls",
        "falls within its interval",
        "lags",
        "follows",
        "follows behind",
        "is ahead",
        "another scale",
        "too few results",
    ],
)
def test_held_out_results_are_compared_with_training(rewards, shares, half, evidence):
    health = judge_learning(with_held_out(rewards, shares, half))
    assert health.word == ("suspect" if evidence else "healthy"), health.evidence
    assert evidence is None or any(evidence in sentence for sentence in health.evidence)


def test_the_words_are_ordered():
    assert (
        SEVERITY["healthy"]
        == SEVERITY["too early"]
        == SEVERITY["unknown"]
        < SEVERITY["not learning"]
    )
    assert SEVERITY["not learning"] == SEVERITY["suspect"] < SEVERITY["broken"]


@pytest.mark.parametrize(
    ("rate", "change", "word"),
    [
        (4e-5, 0.0, "broken"),
        (4e-5, 2e-7, "healthy"),
        (1e-3, 9e-7, "broken"),
        (1e-3, 2e-6, "healthy"),
        (9e-7, 0.0, "healthy"),
        (None, 0.0, "healthy"),
    ],
)
def test_the_change_of_the_weights_is_judged_by_the_rate_of_the_update(rate, change, word):
    assert (
        judge_learning(healthy(40, **{"train/learning_rate": rate, "weights/change": change})).word
        == word
    )


def test_a_standstill_counts_at_the_rate_of_the_update_that_made_it():
    """A line has the change by the update of the line before, whose rate may have been 0."""
    steps = healthy(40, **{"weights/change": 0.0})
    for step in steps[::2]:
        step["train/learning_rate"] = 0.0
    assert judge_learning(steps).word == "healthy"


def test_commands_name_the_whole_run():
    facts = RunFacts(
        environment="a",
        additional_environments=("b=2",),
        model="/models/mine",
        tunable_fields=frozenset({"group_size"}),
    )
    assert (
        facts.format_train_command("group_size=8", "learning_rate=1")
        == "`lachesis train a --with b=2 --model /models/mine --set group_size=8`"
    )
    assert facts.format_test_command() == "`lachesis test a --model /models/mine`"
    assert (
        RunFacts(profile="tinker", environment="a", model="Qwen/Qwen3-8B").format_test_command()
        == "`lachesis test a --profile tinker --model Qwen/Qwen3-8B`"
    )
