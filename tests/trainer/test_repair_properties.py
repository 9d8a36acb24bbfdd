"""Properties of repaired prompts and rollouts, and of the learning rate."""

import itertools

import numpy as np
import pytest
from hypothesis import strategies as st

from lachesis.rollout_api.scored_group import (
    build_keep_mask,
    collapse_doubled_eos,
    find_sampled_spans,
)
from lachesis.trainer.batch.advantages import compute_learning_rate
from tests.harness.properties import examples
from tests.trainer.random_groups import EOS, rollouts

TOKENS = st.lists(st.integers(0, 4), max_size=12)


@examples(TOKENS)
def test_a_prompt_is_repaired_once(tokens):
    once = collapse_doubled_eos(tokens, EOS)
    assert collapse_doubled_eos(once, EOS) == once
    assert all(pair != (EOS, EOS) for pair in itertools.pairwise(once))
    assert [token for token in once if token != EOS] == [token for token in tokens if token != EOS]
    assert (EOS in once) == (EOS in tokens)
    assert collapse_doubled_eos(tokens, None) == tokens


@examples(rollouts())
def test_a_rollout_is_repaired_once_and_keeps_what_was_sampled(rollout):
    tokens_T, sampled_T = np.array(rollout[0]), np.array(rollout[1])
    keep_T = build_keep_mask(tokens_T, EOS, sampled_T)
    assert keep_T[sampled_T].all()
    assert keep_T[tokens_T != EOS].all()
    assert build_keep_mask(tokens_T[keep_T], EOS, sampled_T[keep_T]).all()


@examples(rollouts())
def test_a_turn_is_trained_in_the_context_in_which_it_was_sampled(rollout):
    """What stands before each sampled piece is what the inference server made of the prompt of that
    turn.
    """
    tokens_T, sampled_T = np.array(rollout[0]), np.array(rollout[1])
    keep_T = build_keep_mask(tokens_T, EOS, sampled_T)
    for start, _ in find_sampled_spans(sampled_T):
        before = tokens_T[:start]
        doubled = (before[1:] == EOS) & (before[:-1] == EOS) & sampled_T[1:start]
        # a sampled end of turn behind another stays in training, and no prompt knows what was
        # sampled
        if doubled.any():
            continue
        assert before[keep_T[:start]].tolist() == collapse_doubled_eos(before.tolist(), EOS)


@examples(
    st.floats(1e-9, 1),
    st.integers(1, 400),
    st.integers(0, 400),
    st.sampled_from(["constant", "linear", "cosine"]),
)
def test_a_learning_rate_stays_within_its_peak(peak, total, warmup, schedule):
    rates = [
        compute_learning_rate(peak, step, total, schedule=schedule, warmup_steps=warmup)
        for step in range(total)
    ]
    assert all(0 <= rate <= peak * (1 + 1e-12) for rate in rates)
    assert (np.diff(rates[:warmup]) >= 0).all()
    assert (np.diff(rates[warmup:]) <= 0).all()
    if warmup < total:
        assert max(rates) == pytest.approx(peak)
