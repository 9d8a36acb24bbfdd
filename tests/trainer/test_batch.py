"""Scored groups to datums, on numbers worked out by hand."""

from typing import Any

import numpy as np
import pytest

from lachesis.base.errors import BatchError
from lachesis.rollout_api.scored_group import collapse_doubled_eos
from lachesis.trainer.batch.group_to_datums import BatchSettings, to_batch
from lachesis.trainer.batch.kl_penalty import add_kl_penalty

EOS = 99


def group(scores, **extra):
    """Rollouts of two prompt tokens and two sampled ones; sentinel logprobs 1.0 on the prompt, as
    Atropos has them.
    """
    count = len(scores)
    return {
        "tokens": [[1, 2, 3 + index, EOS] for index in range(count)],
        "masks": [[-100, -100, 3 + index, EOS] for index in range(count)],
        "inference_logprobs": [[1.0, 1.0, -0.5, -0.25] for _ in range(count)],
        "scores": scores,
        **extra,
    }


def batch(*groups, max_tokens=100, **options):
    return to_batch(groups, BatchSettings(max_tokens=max_tokens, eos_id=EOS, **options))


def test_targets_are_the_tokens_shifted_and_prompts_carry_nothing():
    first, second = batch(group([1.0, 0.0])).datums
    assert first.tokens.tolist() == [1, 2, 3]
    assert first.targets.tolist() == [2, 3, EOS]
    assert first.loss_mask.tolist() == [False, True, True]
    assert first.logprobs.tolist() == [0.0, -0.5, -0.25]
    assert first.advantages.tolist() == [0.0, 0.5, 0.5]
    assert second.advantages.tolist() == [0.0, -0.5, -0.5]


def test_equal_scores_have_no_signal_whatever_their_mean_rounds_to():
    """The mean of six times 0.1 is not 0.1."""
    assert batch(group([0.1] * 6)).zero_signal_groups == 1


def test_a_group_of_equal_scores_teaches_nothing_and_counts_in_the_reward():
    found = batch(group([1.0, 1.0]), group([0.0, 1.0]))
    assert (found.num_groups, found.zero_signal_groups, len(found.datums)) == (2, 1, 2)
    assert found.compute_metrics()["reward/mean"] == 0.75


def test_the_share_of_correct_rollouts_is_that_of_scores_above_0():
    assert batch(group([1.0, 0.0, -1.0, 0.5])).compute_metrics()["train/percent_correct"] == 0.5
    assert "train/percent_correct" not in batch().compute_metrics(), "nothing was scored"


def test_an_override_silences_a_rollout_or_a_group():
    one = group([1.0, 0.0], overrides=[{"set_advantage_to_zero": True}, None])
    assert len(batch(one).datums) == 1
    assert batch(group([1.0, 0.0], group_overrides={"set_advantage_to_zero": True})).datums == []


def test_a_rollout_that_is_too_long_is_left_out_and_counted():
    found = batch(group([1.0, 0.0]), max_tokens=3)
    assert (found.num_too_long, found.datums) == (2, [])


def test_the_doubled_end_of_turn_is_dropped():
    """[EOS sampled][EOS of the template] becomes one EOS, the sampled one."""
    one = group([1.0, 0.0])
    for index in range(2):
        one["tokens"][index] = [1, 5, EOS, EOS, 7, 8]
        one["masks"][index] = [-100, 5, EOS, -100, -100, 8]
        one["inference_logprobs"][index] = [1.0, -0.1, -0.2, 1.0, 1.0, -0.3]
    datum = batch(one).datums[0]
    assert datum.tokens.tolist() == [1, 5, EOS, 7]
    assert datum.targets.tolist() == [5, EOS, 7, 8]
    assert datum.loss_mask.tolist() == [True, True, False, True]
    np.testing.assert_allclose(datum.logprobs, [-0.1, -0.2, 0.0, -0.3], rtol=1e-6)
    assert collapse_doubled_eos([1, EOS, EOS, 7], EOS) == [1, EOS, 7]
    assert collapse_doubled_eos([1, EOS, 7], EOS) == [1, EOS, 7]


def test_distillation_takes_the_teachers_gap():
    """advantage = teacher logprob - student logprob, for K = 1."""
    one = group([0.0, 0.0])
    one["distill_token_ids"] = [[[token] for token in tokens] for tokens in one["tokens"]]
    one["distill_logprobs"] = [[[0.0], [0.0], [-0.1], [-0.5]] for _ in range(2)]
    found = batch(one)
    np.testing.assert_allclose(found.datums[0].advantages, [0.0, 0.4, -0.25], rtol=1e-6)
    assert found.compute_metrics()["distil/rollouts"] == 2


def test_more_than_one_teacher_token_is_refused_with_the_shape():
    one = group([0.0, 1.0])
    one["distill_token_ids"] = [[[t, t] for t in tokens] for tokens in one["tokens"]]
    one["distill_logprobs"] = [[[0.0, 0.0]] * 4 for _ in range(2)]
    with pytest.raises(BatchError, match=r"distill_token_ids has shape \(4, 2\).*only \(4, 1\)"):
        batch(one)


def taught(ids, logprob):
    """What a teacher gives for each rollout of `group([1.0, 0.0])`."""
    return {
        "distill_token_ids": [[[token] for token in ids]] * 2,
        "distill_logprobs": [[[-1.0]] * 3 + [[logprob]]] * 2,
    }


def test_several_environments_have_metrics_of_their_own():
    named = [
        group(scores, group_overrides={"environment": name})
        for name, scores in (("a", [1.0, 0.0]), ("b", [1.0, 1.0]))
    ]
    metrics = batch(*named, named[0], group([0.0, 0.0])).compute_metrics()
    assert (metrics["environments/a/reward_mean"], metrics["environments/a/rollouts"]) == (0.5, 4)
    assert (metrics["environments/b/reward_mean"], metrics["environments/b/rollouts"]) == (1.0, 2)


def test_a_rollout_without_a_sampled_token_was_not_cut():
    unsampled = group([1.0, 0.0], masks=[[-100] * 4] * 2)
    made = batch(unsampled, was_truncated=lambda tokens, logprobs: True)
    assert (made.num_truncated, made.datums) == (0, [])
    assert "logprobs/mean" not in made.compute_metrics()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            taught([1, 2, 7, EOS], -1.0),
            "distill_token_ids names other tokens than those that were sampled",
        ),
        (
            {**taught([1, 2, 3, EOS], float("-inf")), "tokens": [[1, 2, 3, EOS]] * 2},
            "are not finite, or below -1000",
        ),
        ({"scores": [float("nan"), 1.0]}, "group 0: a score is nan; allowed: finite numbers"),
        ({"scores": [1.0]}, "group 0: a group has 2 rollouts and 1 scores"),
        ({"scores": [[1.0], [0.0]]}, r"a score is \[1.0\]"),
        ({"inference_logprobs": None}, "the environment sent no inference_logprobs"),
        (
            {"inference_logprobs": [[-1.0] * 4]},
            "2 rollouts and 1 inference_logprobs; needed: one list per rollout",
        ),
        (
            {"inference_logprobs": [[-1.0], [-1.0]]},
            "rollout 0 has 4 tokens and 1 inference_logprobs",
        ),
        ({"masks": [[-100, -100, 3, EOS]]}, "2 rollouts and 1 masks"),
        ({"masks": [[-100] * 3, [-100] * 3]}, "rollout 0 has 4 tokens and 3 masks"),
        (
            {"inference_logprobs": [[1.0, 1.0, float("-inf"), 0.0]] * 2},
            r"are not usable: \[-inf\]; allowed: -1000 to 0",
        ),
        (
            {"inference_logprobs": [[1.0, 1.0, 1.0, -0.5]] * 2},
            r"are not usable: \[1.0\]; allowed: -1000 to 0",
        ),
        ({"inference_logprobs": [[1.0, 1.0, -9999.0, -0.5]] * 2}, "allowed: -1000 to 0"),
        ({"tokens": [[1, 2, -3, EOS]] * 2}, "no token id may be negative"),
        ({"tokens": [[1, 2, 10**30, EOS]] * 2}, "OverflowError"),
        ({"tokens": [[1, 2, "x", EOS]] * 2}, "ValueError"),
        ({"tokens": [[[1], [2], [3], [4]]] * 2}, "lists of numbers"),
        ({"overrides": {"0": "x"}}, "overrides is .*; a list or null is needed"),
        ({"group_overrides": ["x"]}, "group_overrides is .*; an object or null is needed"),
        (
            {"distill_logprobs": [[[0.0]] * 4] * 2},
            "distill_token_ids and distill_logprobs must be given together",
        ),
        ({"tokens": []}, "at least one rollout"),
    ],
)
def test_data_that_cannot_be_trained_on_is_named(change, message):
    with pytest.raises(BatchError, match=message):
        batch({**group([1.0, 0.0]), **change})


def test_a_bad_group_is_left_out_and_named_and_the_others_are_trained_on():
    """Whole, also when only its last rollout is bad."""
    good, bad = group([1.0, 0.0]), group([1.0, 0.0])
    bad["inference_logprobs"][1] = [1.0, 1.0, 1.0, 1.0]
    mixed = batch(good, bad, {**good, "masks": good["masks"][:1]}, "no group")  # type: ignore[arg-type]
    assert sorted(mixed.drop_reasons) == [1, 2, 3]
    assert (
        "rollout 1: 2 sampling logprobs of trained tokens are not usable" in mixed.drop_reasons[1]
    )
    alone = batch(good)
    assert [datum.advantages.tolist() for datum in mixed.datums] == [
        datum.advantages.tolist() for datum in alone.datums
    ]
    assert {**mixed.compute_metrics(), "batch/dropped_groups": 0} == alone.compute_metrics()
    assert mixed.compute_metrics()["batch/dropped_groups"] == 3
    named = to_batch(
        [good, good],
        BatchSettings(max_tokens=100, eos_id=EOS),
        {0: "the model gave no log-probabilities"},
    )
    assert (len(named.datums), named.drop_reasons) == (
        2,
        {0: "the model gave no log-probabilities"},
    )


def test_a_batch_without_any_good_group_is_refused_with_the_first_reason():
    bad = {**group([1.0, 0.0]), "masks": [[-100] * 4]}
    with pytest.raises(
        BatchError,
        match="none of the 2 groups of a batch can be trained on; group 0: a group has 2 rollouts",
    ):
        batch(bad, bad)


def penalised(*groups, base, coefficient, **options):
    """Add the penalty, with one log-probability of the base model for all tokens."""
    recipe = BatchSettings(max_tokens=100, eos_id=EOS, has_kl_penalty=True, **options)
    made = to_batch(groups, recipe)
    base_D = [np.full(int(datum.loss_mask.sum()), base) for datum in made.datums]
    return made, add_kl_penalty(made, base_D, coefficient, recipe)


def test_the_penalty_leaves_out_what_its_environment_leaves_out():
    silent = group([1.0, 1.0], group_overrides={"set_advantage_to_zero": True})
    marked = group(
        [1.0, 0.0, 0.5], overrides=[{"set_advantage_to_zero": True}, {"invalid": "away"}, {}]
    )
    made, _ = penalised(silent, marked, group([1.0, 1.0]), base=-1.0, coefficient=0.8)
    assert len(made.datums) == 3


def test_rollouts_are_weighed_after_the_penalty():
    """A long rollout of three tokens and a short one of one: 2 on average."""
    mixed = group([1.0, 1.0])
    mixed["tokens"][0], mixed["masks"][0] = [1, 2, 3, 4, 5], [-100, -100, 3, 4, 5]
    mixed["inference_logprobs"][0] = [1.0, 1.0, -0.5, -0.5, -0.5]
    mixed["tokens"][1], mixed["masks"][1], mixed["inference_logprobs"][1] = (
        [1, 2, 9],
        [-100, -100, 9],
        [1.0, 1.0, -1.5],
    )
    penalised_batch, distance = penalised(
        mixed, base=-1.0, coefficient=1.0, loss_aggregation="sequence_mean"
    )
    assert distance == pytest.approx(0.25)
    first, second = penalised_batch.datums
    np.testing.assert_allclose(first.advantages, [0.0, *[-0.25 * 2 / 3] * 3], rtol=1e-6)
    np.testing.assert_allclose(second.advantages, [0.0, 0.75 * 2])


def test_metrics_have_the_names_of_the_contract():
    metrics = batch(group([1.0, 0.0])).compute_metrics()
    for name in (
        "reward/mean",
        "advantages/mean",
        "advantages/std",
        *(f"logprobs/{x}" for x in ("mean", "std", "min", "p50")),
    ):
        assert name in metrics
    assert metrics["logprobs/mean"] == pytest.approx(-0.375)
    assert metrics["logprobs/min"] == -0.5


def test_rollouts_that_were_cut_can_be_left_out_and_still_count_in_the_mean():
    """The last sampled piece decides, by its tokens and its logprobs."""
    seen = []

    def was_cut(tokens, logprobs):
        seen.append((tokens, logprobs))
        return tokens[0] == 3

    found = batch(group([1.0, 0.0]), was_truncated=was_cut)
    assert (found.num_truncated, len(found.datums)) == (1, 1)
    assert found.datums[0].advantages.tolist() == [0.0, -0.5, -0.5]
    assert seen[0] == ([3, EOS], [-0.5, -0.25])
    assert found.compute_metrics()["batch/cut"] == 1


def test_the_advantage_of_the_configuration_is_taken():
    (first, _) = batch(group([1.0, 0.0]), advantage="leave_one_out").datums
    assert first.advantages.tolist() == [0.0, 1.0, 1.0]


def test_an_invalid_rollout_is_left_out_of_the_mean():
    """Whatever score it carries."""
    marks = [
        None,
        {"invalid": "the judge is away", "set_advantage_to_zero": True},
        {},
        {"zero": "it rambles"},
    ]
    made = batch(group([1.0, 7.0, 0.5, 0.0], overrides=marks))
    assert [float(datum.advantages[-1]) for datum in made.datums] == [0.5, -0.5], (
        "that of 0.5 is nought"
    )
    metrics = made.compute_metrics()
    assert (metrics["reward/mean"], metrics["batch/rollouts"], metrics["batch/invalid"]) == (
        0.5,
        3,
        1,
    )
    silent = batch(group([1.0, 0.0, 1.0], overrides=[{}, {"invalid": "away"}, {}]))
    assert (silent.zero_signal_groups, silent.datums) == (1, [])
    assert batch(group([1.0, 0.0], overrides=[{"invalid": "a"}, {"invalid": "b"}])).datums == []


def test_the_parts_of_a_reward_are_metrics():
    invalid = {"parts": {"form": 9}, "invalid": "x"}
    marks: list[Any] = [{"parts": {"form": 0.5, "value": 0.5}}, {"parts": {"form": 0.5}}, invalid]
    metrics = batch(group([1.0, 0.5, 3.0], overrides=marks)).compute_metrics()
    assert (metrics["reward/parts/form"], metrics["reward/parts/value"]) == (0.5, 0.5)
    for odd in ({"parts": [1]}, {"parts": {"form": "high", "value": float("nan")}}, "text", 3):
        assert not [
            name
            for name in batch(group([1.0, 0.0], overrides=[odd, odd])).compute_metrics()
            if "parts" in name
        ]
