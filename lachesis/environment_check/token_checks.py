"""Check what would be trained on: lengths, masks, log-probabilities, round trip, stop tokens, and
answers that the token limit has truncated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from lachesis.base.json_text import Json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_TRUNCATED_SHARE = 0.5
Status = Literal["passed", "warned", "failed", "not offered"]


@dataclass(frozen=True)
class CheckResult:
    """Hold the result of one check."""

    name: str
    status: Status
    message: str
    seconds: float = 0.0


def check_tokens(group: Mapping[str, Any]) -> CheckResult:
    """Find rollouts that the trainer would refuse or could not learn from."""
    logprobs_G = group.get("inference_logprobs")
    if not logprobs_G:
        logprobs_G = [[0.0] * len(tokens) for tokens in group["tokens"]]
    num_trained = 0
    for index, (tokens, masks, logprobs) in enumerate(
        zip(group["tokens"], group["masks"], logprobs_G, strict=False)
    ):
        if problem := _find_token_problem(tokens, masks, logprobs):
            return CheckResult("tokens", "failed", f"rollout {index} has {problem}")
        num_trained += sum(mask != -100 for mask in masks)
    if not num_trained:
        return CheckResult(
            "tokens", "failed", "every token is masked with -100: nothing would be trained on"
        )
    message = (
        f"{num_trained} of {sum(map(len, group['tokens']))} would be trained on: those that the "
        "model has generated"
    )
    if not group.get("inference_logprobs"):
        remark = (
            "the group has no inference_logprobs, so the trainer must compute them; node.logprobs "
            "has the exact ones"
        )
        return CheckResult("tokens", "warned", f"{message}; {remark}")
    return CheckResult("tokens", "passed", message)


def _find_token_problem(
    tokens: Sequence[int], masks: Sequence[int], logprobs: Sequence[float]
) -> str | None:
    """Return the first fault for which the trainer would refuse a rollout; None without a fault."""
    if not len(tokens) == len(masks) == len(logprobs):
        lengths = f"{len(tokens)} tokens, {len(masks)} masks and {len(logprobs)} logprobs"
        return f"{lengths}; the three must have one length"
    for position, (token, mask, logprob) in enumerate(zip(tokens, masks, logprobs, strict=True)):
        if mask not in (-100, token):
            return f"a mask {mask} at token {token}; allowed: -100 and the token"
        # The first token is not predicted. Rounding may make a log-probability slightly positive.
        if position and mask != -100 and not logprob <= 0.01:
            return f"a log-probability of {logprob} at a token to be trained on"
    return None


def check_round_trip(group: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> CheckResult:
    """Compare the first prompt's ids with those of its text."""
    masks = group["masks"][0]
    prompt = group["tokens"][0][
        : next((position for position, mask in enumerate(masks) if mask != -100), len(masks))
    ]
    reencoded = tokenizer.encode(tokenizer.decode(prompt), add_special_tokens=False)
    if prompt != reencoded:
        return CheckResult(
            "round trip",
            "warned",
            f"the prompt has {len(prompt)} ids; its text, tokenized again, has {len(reencoded)}, "
            f"or different ones",
        )
    return CheckResult(
        "round trip", "passed", f"the prompt's {len(prompt)} ids are those of its text"
    )


def check_stop_tokens(group: Mapping[str, Any], eos_id: int | None) -> CheckResult:
    """Return whether answers end with the end-of-turn token, and how many turns end twice."""
    num_ended = sum(_find_last_trained_token(masks) == eos_id for masks in group["masks"])
    num_doubled = sum(
        token == next_token == eos_id and (mask, next_mask) == (eos_id, -100)
        for tokens, masks in zip(group["tokens"], group["masks"], strict=True)
        for token, next_token, mask, next_mask in zip(
            tokens, tokens[1:], masks, masks[1:], strict=False
        )
    )
    message = (
        f"{num_ended} of {len(group['masks'])} answers end with the end-of-turn token, which is "
        "trained on"
    )
    if num_doubled:
        return CheckResult(
            "stop tokens",
            "warned",
            f"{message}; {num_doubled} turns end twice, which the trainer repairs (ConversationEnv "
            "avoids it)",
        )
    return CheckResult("stop tokens", "passed" if num_ended else "warned", message)


def _find_last_trained_token(masks: list[int]) -> int | None:
    return next((mask for mask in reversed(masks) if mask != -100), None)


def check_truncation(counts: Json) -> CheckResult:
    """Return whether too many answers were cut off at the limit of tokens."""
    num_truncated, num_completions = (
        int(counts.get("truncated", 0)),
        int(counts.get("completions", 0)),
    )
    message = f"{num_truncated} of {num_completions} answers were truncated at the token limit"
    return CheckResult(
        "truncation",
        "warned"
        if num_completions and num_truncated / num_completions >= MAX_TRUNCATED_SHARE
        else "passed",
        message,
    )
