"""Properties of advantages, batches and penalties that hold for all groups."""

import copy

import numpy as np
import pytest
from hypothesis import assume
from hypothesis import strategies as st

from lachesis.base.errors import BatchError
from lachesis.rollout_api.scored_group import build_keep_mask
from lachesis.trainer.batch.advantages import compute_advantages, compute_sequence_weights
from lachesis.trainer.batch.group_to_datums import IGNORE_INDEX, BatchSettings, to_batch
from lachesis.trainer.batch.kl_penalty import add_kl_penalty, compute_kl_penalties
from tests.harness.properties import examples
from tests.trainer.random_groups import (
    BATCHES,
    EOS,
    KINDS,
    LOGPROBS,
    RECIPE,
    SCORES,
    contents,
    facts,
    groups,
    permuted,
)


@examples(st.lists(SCORES, min_size=1, max_size=8), KINDS, SCORES)
def test_advantages_of_a_group_add_up_to_zero_and_do_not_know_where_the_scale_begins(
    scores, kind, shift
):
    advantages = compute_advantages(np.array(scores), kind)
    assert advantages.sum() == pytest.approx(0.0, abs=1e-9 * max(1.0, np.abs(advantages).max()))
    np.testing.assert_allclose(
        compute_advantages(np.array(scores) + shift, kind), advantages, rtol=1e-9, atol=1e-9
    )


@examples(st.lists(SCORES, min_size=2, max_size=8), KINDS, st.randoms(use_true_random=False))
def test_advantages_follow_their_scores(scores, kind, random):
    """A higher score has a higher advantage, and the order of the rollouts does not matter."""
    values, order = np.array(scores), list(range(len(scores)))
    random.shuffle(order)
    advantages = compute_advantages(values, kind)
    np.testing.assert_allclose(
        compute_advantages(values[order], kind), advantages[order], rtol=1e-9, atol=1e-9
    )
    assert (np.diff(advantages[np.argsort(values)]) >= -1e-9).all()


@examples(st.lists(SCORES, min_size=2, max_size=8), st.floats(0.1, 100))
def test_each_kind_of_advantage_has_its_scale(scores, factor):
    values = np.array(scores)
    for kind in ("mean", "leave_one_out"):
        np.testing.assert_allclose(
            compute_advantages(factor * values, kind),
            factor * compute_advantages(values, kind),
            atol=1e-9,
        )  # type: ignore[arg-type]
    others = [np.mean(np.delete(values, index)) for index in range(len(values))]
    np.testing.assert_allclose(
        compute_advantages(values, "leave_one_out"), values - others, atol=1e-9
    )
    assume(values.std() > 0.1)
    assert compute_advantages(factor * values, "mean_std").std() == pytest.approx(1.0, rel=1e-3)


@examples(BATCHES, st.sampled_from(["token_mean", "sequence_mean"]), KINDS)
def test_masked_positions_never_contribute(batch, aggregation, kind):
    """Whatever stands at them, and at the first token, which nothing predicts."""
    recipe = BatchSettings(
        max_tokens=1000, eos_id=EOS, loss_aggregation=aggregation, advantage=kind
    )
    made = to_batch(batch, recipe)
    for datum in made.datums:
        assert not datum.logprobs[~datum.loss_mask].any()
        assert not datum.advantages[~datum.loss_mask].any()
        assert np.isfinite(datum.advantages).all()
    other = copy.deepcopy(batch)
    for group in other:
        for masks, logprobs in zip(group["masks"], group["inference_logprobs"], strict=True):
            for index, mask in enumerate(masks):
                if mask == IGNORE_INDEX or index == 0:
                    logprobs[index] = -77.0
    assert contents(to_batch(other, recipe)) == contents(made)


@examples(
    groups(),
    groups(),
    st.randoms(use_true_random=False),
    st.sampled_from(["token_mean", "sequence_mean"]),
)
def test_the_order_of_rollouts_and_groups_does_not_matter(first, second, random, aggregation):
    recipe = BatchSettings(max_tokens=1000, eos_id=EOS, loss_aggregation=aggregation)
    order = list(range(len(first["scores"])))
    random.shuffle(order)
    whole = to_batch([first, second], recipe)
    other = to_batch([second, permuted(first, order)], recipe)
    assert sorted(contents(other)) == sorted(contents(whole))
    assert other.compute_metrics() == pytest.approx(whole.compute_metrics(), rel=1e-6, abs=1e-6)


@examples(BATCHES, SCORES)
def test_datums_do_not_know_where_the_scale_of_the_scores_begins(batch, shift):
    moved = [{**group, "scores": [score + shift for score in group["scores"]]} for group in batch]
    assert contents(to_batch(moved, RECIPE)) == contents(to_batch(batch, RECIPE))


@examples(BATCHES)
def test_no_trained_token_is_lost_or_invented(batch):
    """But the first of a rollout; and a rollout at the mean of its group teaches nothing."""
    made = to_batch(batch, RECIPE)
    datums = iter(made.datums)
    for group in batch:
        mean = sum(group["scores"]) / len(group["scores"])
        for tokens, masks, values, score in zip(
            group["tokens"],
            group["masks"],
            group["inference_logprobs"],
            group["scores"],
            strict=True,
        ):
            trained = [
                index for index, mask in enumerate(masks) if mask != IGNORE_INDEX and index > 0
            ]
            if not trained or score == mean:
                continue
            datum = next(datums)
            assert datum.targets[datum.loss_mask].tolist() == [tokens[index] for index in trained]
            np.testing.assert_array_equal(
                datum.logprobs[datum.loss_mask], np.float32([values[index] for index in trained])
            )
            np.testing.assert_allclose(datum.advantages[datum.loss_mask], score - mean, rtol=1e-6)
            kept = build_keep_mask(np.array(tokens), EOS, np.array(masks) != IGNORE_INDEX)
            assert [*datum.tokens, datum.targets[-1]] == np.array(tokens)[kept].tolist()
            np.testing.assert_array_equal(datum.tokens[1:], datum.targets[:-1])
    assert next(datums, None) is None
    assert made.compute_metrics()["batch/trained_tokens"] == sum(
        int(datum.loss_mask.sum()) for datum in made.datums
    )


@examples(BATCHES)
def test_each_rollout_counts_the_same_by_sequence_and_the_sum_stays(batch):
    token = to_batch(batch, RECIPE).datums
    sequence = to_batch(
        batch, BatchSettings(max_tokens=1000, eos_id=EOS, loss_aggregation="sequence_mean")
    ).datums
    assume(token)
    factors = [
        float((weighed.advantages[weighed.loss_mask] / plain.advantages[plain.loss_mask]).mean())
        for plain, weighed in zip(token, sequence, strict=True)
    ]
    lengths = [int(datum.loss_mask.sum()) for datum in token]
    np.testing.assert_allclose(np.multiply(factors, lengths), np.mean(lengths), rtol=1e-5)
    np.testing.assert_allclose(compute_sequence_weights(lengths), factors, rtol=1e-5)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2)
    ),
    max_leaves=8,
)
NAMES = [
    "tokens", "masks", "inference_logprobs", "scores", "overrides", "group_overrides",
    "distill_token_ids", "distill_logprobs",
]  # fmt: skip


@st.composite
def odd_groups(draw):
    """A group of which something is replaced, shortened or left out, or no group at all."""
    group = copy.deepcopy(draw(groups()))
    for name in draw(st.lists(st.sampled_from(NAMES), max_size=2)):
        value = group.get(name)
        change = draw(st.integers(0, 3))
        if change == 0:
            group.pop(name, None)
        elif change == 1 or not isinstance(value, list) or not value:
            group[name] = draw(JSON)
        elif change == 2:
            group[name] = value[:-1]
        else:
            value[draw(st.integers(0, len(value) - 1))] = draw(JSON)
    return draw(st.just(group) | JSON) if draw(st.integers(0, 9)) == 0 else group


@examples(
    st.lists(odd_groups(), max_size=3),
    groups(),
    st.sampled_from(["token_mean", "sequence_mean"]),
    st.booleans(),
)
def test_a_bad_group_changes_nothing_for_the_others(odd, good, aggregation, penalised):
    """Whatever it holds: what is trained on is finite, and a batch with one good group is never
    refused.
    """
    recipe = BatchSettings(
        max_tokens=1000, eos_id=EOS, loss_aggregation=aggregation, has_kl_penalty=penalised
    )
    made = to_batch([*odd, good], recipe)
    usable = [group for number, group in enumerate(odd) if number not in made.drop_reasons]
    assert len(odd) not in made.drop_reasons
    assert contents(to_batch([*usable, good], recipe)) == contents(made)
    assert made.num_groups == len(usable) + 1
    for datum in made.datums:
        assert np.isfinite(datum.advantages).all()
        assert np.isfinite(datum.logprobs).all()
        assert (
            len(datum.tokens) == len(datum.targets) == len(datum.logprobs) == len(datum.advantages)
        )
        assert datum.loss_mask.any()
    assert all(np.isfinite(value) for value in made.compute_metrics().values())
    bad = [group for number, group in enumerate(odd) if number in made.drop_reasons]
    if bad:
        with pytest.raises(BatchError, match="can be trained on; group 0: "):
            to_batch(bad, recipe)


def base_of(batch, draw):
    lengths = [int(datum.loss_mask.sum()) for datum in batch.datums]
    return [
        np.array(draw.draw(st.lists(LOGPROBS, min_size=count, max_size=count))) for count in lengths
    ]


@examples(
    st.lists(st.lists(LOGPROBS, min_size=1, max_size=5), min_size=1, max_size=4),
    st.floats(0, 10),
    st.data(),
    LOGPROBS,
)
def test_the_penalty_adds_up_to_zero_and_pulls_towards_the_base(sampling, coefficient, data, shift):
    sampling_D = [np.array(values) for values in sampling]
    base_D = [
        np.array(data.draw(st.lists(LOGPROBS, min_size=len(row), max_size=len(row))))
        for row in sampling
    ]
    penalties, mean = compute_kl_penalties(sampling_D, base_D, coefficient)
    distance, penalty = (
        np.concatenate(sampling_D) - np.concatenate(base_D),
        np.concatenate(penalties),
    )
    assert mean == pytest.approx(distance.mean())
    assert penalty.sum() == pytest.approx(0.0, abs=1e-9)
    np.testing.assert_allclose(penalty, -coefficient * (distance - distance.mean()), atol=1e-9)
    moved, moved_mean = compute_kl_penalties(
        sampling_D, [base + shift for base in base_D], coefficient
    )
    assert moved_mean == pytest.approx(mean - shift)
    np.testing.assert_allclose(np.concatenate(moved), penalty, atol=1e-8)


@examples(BATCHES, st.floats(0.01, 5), st.data())
def test_the_penalty_reaches_every_rollout_with_trained_tokens(batch, coefficient, data):
    """On top of the advantages that it would have without the penalty, and then it is centred."""
    recipe = BatchSettings(max_tokens=1000, eos_id=EOS, has_kl_penalty=True)
    made = to_batch(batch, recipe)
    trained = [
        mask
        for group in batch
        for mask in group["masks"]
        if any(entry != IGNORE_INDEX for entry in mask[1:])
    ]
    assert len(made.datums) == len(trained)
    assume(made.datums)
    scores = [datum.advantages.copy() for datum in made.datums]
    datums = list(made.datums)
    plain = [facts(datum) for datum, score in zip(datums, scores, strict=True) if score.any()]
    assert plain == contents(to_batch(batch, RECIPE))
    base_D = base_of(made, data)
    mean = add_kl_penalty(made, base_D, coefficient, recipe)
    added = np.concatenate(
        [
            (datum.advantages - score)[datum.loss_mask]
            for datum, score in zip(datums, scores, strict=True)
        ]
    )
    sampling = np.concatenate([datum.logprobs[datum.loss_mask] for datum in datums]).astype(
        np.float64
    )
    expected = -coefficient * (sampling - np.concatenate(base_D) - mean)
    np.testing.assert_allclose(added, expected, atol=1e-4)
    assert added.sum() == pytest.approx(0.0, abs=1e-3)
    assert all(not datum.advantages[~datum.loss_mask].any() for datum in datums)


@examples(BATCHES, st.floats(0.01, 5), st.sampled_from(["token_mean", "sequence_mean"]))
def test_a_penalty_of_nothing_changes_nothing(batch, coefficient, aggregation):
    """The base model agrees with the one that sampled: the batch is that without a penalty, weights
    included.
    """
    recipe = BatchSettings(
        max_tokens=1000, eos_id=EOS, loss_aggregation=aggregation, has_kl_penalty=True
    )
    made = to_batch(batch, recipe)
    assume(made.datums)
    base_D = [datum.logprobs[datum.loss_mask].astype(np.float64) for datum in made.datums]
    assert add_kl_penalty(made, base_D, coefficient, recipe) == 0.0
    assert contents(made) == contents(
        to_batch(batch, BatchSettings(max_tokens=1000, eos_id=EOS, loss_aggregation=aggregation))
    )
