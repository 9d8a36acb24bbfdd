"""Check the shape of a scored group: the G rollouts of one prompt as an environment sends them.

The rollout API refuses a group with a fault; the trainer checks again and leaves such a group out
of its batch.
"""

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from lachesis.base.arrays import Array
from lachesis.base.reward_values import is_score

# Lists with one row per rollout, which has one entry per token.
PER_TOKEN_FIELDS = ("masks", "inference_logprobs", "distill_token_ids", "distill_logprobs")
NUMERIC_FIELDS = (
    "tokens",
    "masks",
    "inference_logprobs",
    "ref_logprobs",
    "advantages",
    "distill_logprobs",
)
OTHER_FIELDS = ("overrides", "group_overrides", "generation_params", "messages", "images")


def find_fault(group: object) -> str | None:
    """Return why this group cannot be trained on, or None if its shape is valid.

    Only the number of entries is compared, because checking each value would take as long as
    training on them.
    """
    if not isinstance(group, Mapping) or not all(
        _is_list(group.get(key)) for key in ("tokens", "masks", "scores")
    ):
        return "a group must be an object with the lists tokens, masks and scores"
    tokens = group["tokens"]
    if not len(tokens) or not all(map(_is_list, tokens)):
        return "a group must have at least one rollout, and each must be a list of token ids"
    return _find_score_fault(group) or _find_row_fault(group) or _find_extra_fault(group)


def find_unwritable_value(group: Mapping[str, Any]) -> str | None:
    """Return which list holds a number that is not finite, or None.

    The API could not write such a number as JSON, and would lose the whole batch with it.
    """
    for name in NUMERIC_FIELDS:
        try:
            if group.get(name) is not None and not _is_finite(group[name]):
                return f"{name} holds a number that is not finite"
        except (TypeError, OverflowError, RecursionError):
            return f"{name} holds something other than lists of numbers of usual size"
    for name in OTHER_FIELDS:
        try:
            json.dumps(group.get(name), allow_nan=False)
        except (ValueError, RecursionError):
            return f"{name} holds a number that is not finite, or is nested too deeply"
    return None


def _is_finite(values: object) -> bool:
    """Return whether nested lists hold finite numbers only; a sum is not finite if one number is
    not.

    Raises:
        TypeError: There is something other than lists and numbers.
    """
    if not isinstance(values, list):
        raise TypeError(f"{type(values).__name__} is not a list")
    if values and isinstance(values[0], list):
        return all(map(_is_finite, values))
    return math.isfinite(sum(values))


def _find_score_fault(group: Mapping[str, Any]) -> str | None:
    if len(group["scores"]) != len(group["tokens"]):
        return f"a group has {len(group['tokens'])} rollouts and {len(group['scores'])} scores"
    for score in group["scores"]:
        if not is_score(score):
            return f"a score is {_shorten_value(score)}; allowed: finite numbers of usual size"
    return None


def _find_row_fault(group: Mapping[str, Any]) -> str | None:
    """Return the fault of the lists that need one entry per token; None without a fault."""
    lengths = [len(row) for row in group["tokens"]]
    for name in PER_TOKEN_FIELDS:
        rows = group.get(name)
        if rows is None or (_is_list(rows) and not len(rows) and name != "masks"):
            continue  # Environments send an empty list for what they do not have.
        if not _is_list(rows) or len(rows) != len(lengths):
            return (
                f"a group has {len(lengths)} rollouts and {count_entries(rows)} {name}; needed: "
                f"one list per rollout"
            )
        for index, (row, length) in enumerate(zip(rows, lengths, strict=True)):
            if not _is_list(row) or len(row) != length:
                return (
                    f"rollout {index} has {length} tokens and {count_entries(row)} {name}; needed: "
                    "one entry per token"
                )
    return None


def _find_extra_fault(group: Mapping[str, Any]) -> str | None:
    """Return the fault of a group's optional fields, or None."""
    for name, kind, needed in (
        ("overrides", list, "a list"),
        ("group_overrides", Mapping, "an object"),
    ):
        if group.get(name) is not None and not isinstance(group[name], kind):
            return f"{name} is {_shorten_value(group[name])}; {needed} or null is needed"
    environment_id = group.get("env_id")
    if environment_id is not None and (type(environment_id) is not int or environment_id < 0):
        return (
            f"env_id is {_shorten_value(environment_id)}; needed: the number of a registered "
            "environment, or null"
        )
    if bool(count_entries(group.get("distill_token_ids"))) != bool(
        count_entries(group.get("distill_logprobs"))
    ):
        return "distill_token_ids and distill_logprobs must be given together"
    return None


def _shorten_value(value: object) -> str:
    """Return the beginning of a value for a message.

    Python cannot write lists that are nested too deeply.
    """
    try:
        return ascii(value)[:40]
    except RecursionError:
        return "a value that is nested too deeply"


def _is_list(value: object) -> bool:
    """Return whether a value is a list, or an array of one dimension or more."""
    return isinstance(value, list | tuple) or getattr(value, "ndim", 0) > 0


def count_entries(value: Any) -> int:
    """Return the number of entries of a list or array, and 0 for anything else."""
    if _is_list(value):
        return len(value)
    return 0


def get_environment(group: Mapping[str, Any]) -> str | None:
    """Return the name of the environment that made the group, if the run has several."""
    name = (group.get("group_overrides") or {}).get("environment")
    if isinstance(name, str):
        return name
    return None


def get_item(group: Mapping[str, Any]) -> str | None:
    """Return the item that the group was made of, as JSON, if its environment's process sent it."""
    item = (group.get("group_overrides") or {}).get("item")
    if isinstance(item, str):
        return item
    return None


def get_rollout_overrides(group: Mapping[str, Any], num_rollouts: int) -> list[Mapping[str, Any]]:
    """Return the overrides of the environment for each rollout, beside the scores."""
    overrides = [
        entry if isinstance(entry, Mapping) else {} for entry in group.get("overrides") or ()
    ]
    return [*overrides, *({} for _ in range(num_rollouts))][:num_rollouts]


def find_sampled_spans(loss_mask_T: np.ndarray[Any, Any]) -> list[tuple[int, int]]:
    """Return the start and end of each sampled span of a rollout."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], loss_mask_T.astype(int), [0]])))
    return [(int(start), int(end)) for start, end in edges.reshape(-1, 2)]


# Lower values are not log-probabilities: some servers write -9999 where they have none, for which
# the ratio of the loss would overflow.
MIN_LOGPROB = -1000.0


def build_keep_mask(tokens_T: Array, eos_id: int | None, loss_mask_T: Array | None = None) -> Array:
    """Return a mask (T,) that is true where a token stays.

    An end-of-turn token directly after another one is dropped, unless the model has sampled it. In
    a prompt, without `loss_mask_T`, no token counts as sampled.
    """
    keep_mask_T = np.ones(len(tokens_T), dtype=bool)
    if eos_id is not None:
        is_eos = tokens_T == eos_id
        keep_mask_T[1:] = ~(is_eos[1:] & is_eos[:-1])
    if loss_mask_T is None:
        return keep_mask_T
    return keep_mask_T | loss_mask_T


def collapse_doubled_eos(tokens: list[int], eos_id: int | None) -> list[int]:
    """Return a prompt without doubled end-of-turn tokens."""
    keep_mask_T = build_keep_mask(np.asarray(tokens), eos_id)
    return [token for token, keep in zip(tokens, keep_mask_T, strict=True) if keep]
