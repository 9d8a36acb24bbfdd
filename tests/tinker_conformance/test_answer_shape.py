"""Answers that another server would give in another way than Tinker are named where they arrive."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import tinker

from lachesis.base.errors import ServerProtocolError
from lachesis.tinker_conformance.answer_shape import (
    check_loss_output,
    check_prompt_logprobs,
    check_samples,
)


def make_sequence(num_tokens, logprobs):
    """Make what the SDK hands over of one sample; its own class differs between versions."""
    return SimpleNamespace(tokens=list(range(num_tokens)), logprobs=logprobs)


def make_output(lengths, **metrics):
    return tinker.ForwardBackwardOutput(
        loss_fn_output_type="TensorData",
        loss_fn_outputs=[
            {"logprobs": tinker.TensorData.from_numpy(np.zeros(length, np.float32))}
            for length in lengths
        ],
        metrics={"loss:sum": 1.0} | metrics,
    )


def test_answers_as_the_protocol_gives_them_pass():
    assert check_prompt_logprobs([None, -1.0, -2.0], 3) == [None, -1.0, -2.0]
    check_samples([make_sequence(2, [-1.0, -0.5])], 1)
    check_loss_output(make_output([2, 3]), [2, 3])


@pytest.mark.parametrize(
    ("check", "words"),
    [
        (
            lambda: check_prompt_logprobs([-1.0, -2.0], 3),
            "2 log-probabilities of a text of 3 tokens",
        ),
        (
            lambda: check_prompt_logprobs([None, None, -1.0], 3),
            "None as the log-probability of token 1",
        ),
        (
            lambda: check_prompt_logprobs([None, math.nan, -1.0], 3),
            "nan as the log-probability of token 1",
        ),
        (lambda: check_samples([make_sequence(2, [-1.0, -1.0])], 2), "1 samples"),
        (
            lambda: check_samples([make_sequence(2, None)], 1),
            "0 log-probabilities of a sample of 2 tokens",
        ),
        (
            lambda: check_samples([make_sequence(2, [-1.0, -math.inf])], 1),
            "a sampled token that is not finite",
        ),
        (lambda: check_loss_output(make_output([2]), [2, 3]), "results of 1 datums"),
        (
            lambda: check_loss_output(make_output([2, 2]), [2, 3]),
            "2 log-probabilities of datum 1, which has 3 target tokens",
        ),
    ],
)
def test_another_answer_is_named(check, words):
    with pytest.raises(ServerProtocolError) as raised:
        check()
    message = str(raised.value)
    assert words in message
    assert "the protocol gives" in message
    assert "a run ends at its last checkpoint" in message


def test_a_pass_without_the_sum_of_losses_is_named():
    output = make_output([1], grad_norm=1.0)
    del output.metrics["loss:sum"]
    with pytest.raises(ServerProtocolError, match="the metrics grad_norm of a pass"):
        check_loss_output(output, [1])
