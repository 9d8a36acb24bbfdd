"""The shape of a scored group, checked without the services that ask for it."""

from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest

from lachesis.rollout_api.scored_group import (
    NUMERIC_FIELDS,
    OTHER_FIELDS,
    PER_TOKEN_FIELDS,
    find_fault,
    find_unwritable_value,
)
from tests.harness.properties import examples

GROUP: dict[str, Any] = {
    "tokens": [[1, 2], [3]], "masks": [[-100, 2], [3]], "scores": [1, 0.5],
    "inference_logprobs": [[1.0, -1.0], [-2.0]],
}  # fmt: skip


def nested(depth):
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


# Made once, because every worker of the tests needs a quarter of a second for it.
DEEP = nested(100_000)


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"inference_logprobs": None},
        {"inference_logprobs": []},
        {"overrides": [{"invalid": "away"}], "group_overrides": {"environment": "a"}, "env_id": 0},
        {"distill_token_ids": [[[1], [2]], [[3]]], "distill_logprobs": [[[0.0], [-1.0]], [[-2.0]]]},
        {
            "tokens": [np.array([1, 2]), np.array([3])],
            "masks": [np.array([-100, 2]), np.array([3])],
        },
        {
            "messages": [[{"role": "user", "content": "1+1="}]] * 2,
            "images": None,
            "ref_logprobs": [],
        },
    ],
)
def test_a_sound_group_has_no_fault(more):
    assert find_fault({**GROUP, **more}) is None
    if not isinstance(more.get("tokens", [[]])[0], np.ndarray):
        assert find_unwritable_value({**GROUP, **more}) is None


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"masks": []}, "2 rollouts and 0 masks"),
        ({"masks": [[-100, 2], 3]}, "rollout 1 has 1 tokens and 0 masks"),
        ({"inference_logprobs": 7}, "2 rollouts and 0 inference_logprobs"),
        ({"tokens": [[1, 2], 3]}, "each must be a list of token ids"),
        ({"scores": [1, True, 0]}, "2 rollouts and 3 scores"),
        ({"scores": [1, "high"]}, "a score is 'high'"),
        ({"env_id": True}, "env_id is True"),
        ({"env_id": DEEP}, "env_id is a value that is nested too deeply"),
        ({"scores": [1, DEEP]}, "a score is a value that is nested too deeply"),
        ({"group_overrides": DEEP}, "group_overrides is a value that is nested"),
        ({"distill_logprobs": [[[0.0], [-1.0]], [[-2.0]]]}, "must be given together"),
    ],
)
def test_a_fault_is_named(more, reason):
    assert reason in (find_fault({**GROUP, **more}) or "")
    assert (
        find_fault([GROUP]) == "a group must be an object with the lists tokens, masks and scores"
    )


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        (
            {"inference_logprobs": [[1.0, float("-inf")], [0.0]]},
            "inference_logprobs holds a number that is not finite",
        ),
        (
            {"distill_logprobs": [[[float("nan")]]]},
            "distill_logprobs holds a number that is not finite",
        ),
        ({"tokens": [[10**400]]}, "tokens holds something other than lists of numbers"),
        ({"ref_logprobs": {"a": 1}}, "ref_logprobs holds something other than lists of numbers"),
        ({"advantages": {}}, "advantages holds something other than lists of numbers"),
        ({"advantages": [[1.0], {"a": 1}]}, "advantages holds something other than lists"),
        ({"advantages": DEEP}, "advantages holds something other than lists of numbers"),
        ({"masks": [["x"]]}, "masks holds something other than lists of numbers"),
        (
            {"group_overrides": {"weight": float("inf")}},
            "group_overrides holds a number that is not finite",
        ),
    ],
)
def test_what_json_cannot_hold_is_named(more, reason):
    assert reason in (find_unwritable_value({**GROUP, **more}) or "")


NAMES = sorted({*NUMERIC_FIELDS, *PER_TOKEN_FIELDS, *OTHER_FIELDS, "scores", "env_id"})
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner),
    max_leaves=8,
)


@examples(st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=4), count=300)
def test_any_json_value_in_any_place_gets_an_answer(more):
    """An error here would be a fault of the server, and cost the other groups of the message."""
    group = {**GROUP, **more}
    reason = find_fault(group) or find_unwritable_value(group)
    assert reason is None or len(reason) < 200
    objects = [name for name in NUMERIC_FIELDS if isinstance(group.get(name), dict)]
    assert not objects or reason is not None
