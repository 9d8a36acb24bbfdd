"""The shape of a scored group, checked without the services that ask for it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lachesis.scored_group import find_fault, find_unwritable_value

GROUP: dict[str, Any] = {
    "tokens": [[1, 2], [3]], "masks": [[-100, 2], [3]], "scores": [1, 0.5], "inference_logprobs": [[1.0, -1.0], [-2.0]],
}  # fmt: skip


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"inference_logprobs": None},
        {"inference_logprobs": []},
        {"overrides": [{"invalid": "away"}], "group_overrides": {"environment": "a"}, "env_id": 0},
        {"distill_token_ids": [[[1], [2]], [[3]]], "distill_logprobs": [[[0.0], [-1.0]], [[-2.0]]]},
        {"tokens": [np.array([1, 2]), np.array([3])], "masks": [np.array([-100, 2]), np.array([3])]},
        {"messages": [[{"role": "user", "content": "1+1="}]] * 2, "images": None, "ref_logprobs": []},
    ],
)
def test_a_sound_group_has_no_fault(more: dict[str, Any]) -> None:
    assert find_fault({**GROUP, **more}) is None
    if not isinstance(more.get("tokens", [[]])[0], np.ndarray):
        assert find_unwritable_value({**GROUP, **more}) is None


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"masks": []}, "2 rollouts and 0 masks"),
        ({"masks": [[-100, 2], 3]}, "rollout 1 has 1 tokens and 0 masks"),
        ({"inference_logprobs": 7}, "2 rollouts and 0 inference_logprobs"),
        ({"tokens": [[1, 2], 3]}, "each is a list of token ids"),
        ({"scores": [1, True, 0]}, "2 rollouts and 3 scores"),
        ({"scores": [1, "high"]}, "a score is 'high'"),
        ({"env_id": True}, "env_id is True"),
        ({"distill_logprobs": [[[0.0], [-1.0]], [[-2.0]]]}, "are needed together"),
    ],
)
def test_a_fault_is_named(more: dict[str, Any], reason: str) -> None:
    assert reason in (find_fault({**GROUP, **more}) or "")
    assert find_fault([GROUP]) == "a group is an object with the lists tokens, masks and scores"


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"inference_logprobs": [[1.0, float("-inf")], [0.0]]}, "inference_logprobs holds a number that is not finite"),
        ({"distill_logprobs": [[[float("nan")]]]}, "distill_logprobs holds a number that is not finite"),
        ({"tokens": [[10**400]]}, "tokens holds something other than lists of numbers"),
        ({"masks": [["x"]]}, "masks holds something other than lists of numbers"),
        ({"group_overrides": {"weight": float("inf")}}, "group_overrides holds a number that is not finite"),
    ],
)
def test_what_json_cannot_hold_is_named(more: dict[str, Any], reason: str) -> None:
    assert reason in (find_unwritable_value({**GROUP, **more}) or "")
