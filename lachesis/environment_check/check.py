"""Run `lachesis env check`: everything about an environment that can be known in half a minute.

It needs no Prefect server. The checks are:

    import, config, dataset, model-free check
                   as in a validation; see `lachesis.environment_process.model_free_check`
    rollout        a group of answers of a local model, scored
    tokens         what would be trained on: lengths, masks, log-probabilities
    round trip     the prompt's ids are those of its text
    stop tokens    answers end with one, and no turn ends twice
    truncation     the token limit does not truncate the answers
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lachesis.base.errors import LachesisError, StageError
from lachesis.base.files import write_private
from lachesis.base.json_text import Json, read_json_lines
from lachesis.config.launch_spec import TestSpec
from lachesis.config.run_config import RunConfig
from lachesis.environment_catalog.scan import Environment
from lachesis.environment_check.stages import StageChild, serve_base_model
from lachesis.environment_process.model_free_check import STAGE_NAMES
from lachesis.runs.environment_counters import read_counts
from lachesis.supervision.readiness import wait_until_ended
from lachesis.supervision.running_services import ServiceGroup
from lachesis.supervision.services.inference_test import (
    make_inference_test_spec,
    make_process_config,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

GROUP_SIZE = 8
ROLLOUT_TIMEOUT_S = 120.0
MAX_TRUNCATED_SHARE = 0.5
PASSED_MESSAGES = {
    "dataset": "{items} items tried, {distinct} different",
    "model-free check": "{gold_right} of {items} right answers score as right, {corrupt_wrong} "
    "corrupted ones lower",
}
Status = Literal["passed", "warned", "failed", "not offered"]


@dataclass(frozen=True)
class CheckResult:
    """Hold the result of one check."""

    name: str
    status: Status
    message: str
    seconds: float = 0.0


ResultCallback = Callable[[CheckResult], None]


def run_environment_checks(
    environment: Environment,
    config: RunConfig,
    folder: Path,
    on_result: ResultCallback = lambda line: None,
) -> list[CheckResult]:
    """Run all checks, until one fails that makes the others meaningless.

    Args:
        environment: The environment.
        config: The configuration that it runs with.
        folder: An empty folder, which holds the logs afterwards.
        on_result: Called with each result as soon as it is known.
    """
    results: list[CheckResult] = []

    def add(result: CheckResult) -> bool:
        results.append(result)
        on_result(result)
        return result.status != "failed"

    with ServiceGroup() as group:
        child = StageChild(group, environment.file_path, environment.class_name, config, folder)
        has_passed = all(add(_check_stage(child, name)) for name in STAGE_NAMES)
    if has_passed:
        started = time.monotonic()
        try:
            groups, counts = _sample_group(environment, config, folder)
        except LachesisError as error:
            errors = _format_errors(read_counts(folder / "counters.json") or {})
            if errors:
                message = f"{errors}; the traceback is in {folder / 'rollout.log'}"
            else:
                message = str(error)
            add(CheckResult("rollout", "failed", message, time.monotonic() - started))
            return results
        for result in _check_rollouts(
            groups, counts, config.openai.model_name, time.monotonic() - started
        ):
            add(result)
    return results


def _check_stage(child: StageChild, name: str) -> CheckResult:
    started = time.monotonic()
    try:
        detail = child.wait_for_stage(name).get("detail") or {}
    except StageError as error:
        return CheckResult(name, "failed", str(error), time.monotonic() - started)
    seconds = time.monotonic() - started
    if detail.get("faults"):
        return CheckResult(name, "failed", "; ".join(detail["faults"]), seconds)
    if detail.get("offered") is False:
        return CheckResult(
            name, "not offered", f"the class has no {', '.join(detail['missing'])}", seconds
        )
    return CheckResult(name, "passed", PASSED_MESSAGES.get(name, "").format(**detail), seconds)


def _sample_group(
    environment: Environment, config: RunConfig, folder: Path
) -> tuple[list[Json], Json]:
    """Return a group of the model's answers as the environment would send it, and the counts."""
    output = folder / "rollout.jsonl"
    test_spec = TestSpec(environment=environment.name, steps=1, group_size=GROUP_SIZE)
    with ServiceGroup() as group:
        plan = serve_base_model(group, config, config.openai.model_name, folder / "server")
        content = make_process_config(
            plan.config, test_spec, output, plan.config.openai.model_dump(mode="json"), "check"
        )
        output_files = {
            "output": output,
            "counters": folder / "counters.json",
            "samples": folder / "samples.jsonl",
        }
        spec = {**{name: str(file) for name, file in output_files.items()}, "wandb_run": "check"}
        service, files = make_inference_test_spec(
            environment.file_path,
            content,
            output,
            spec,
            client_env=plan.client_env,
            timeout_s=ROLLOUT_TIMEOUT_S,
        )
        for path, text in files.items():
            write_private(path, text)
        group.start(service)
        wait_until_ended(group, service, needs=[])
    return read_json_lines(output), read_counts(folder / "counters.json") or {}


def _check_rollouts(
    groups: list[Json], counts: Json, model: str, seconds: float
) -> list[CheckResult]:
    errors = _format_errors(counts)
    if not groups:
        return [
            CheckResult(
                "rollout",
                "failed",
                f"no group was made: {errors or 'the environment dropped it'}",
                seconds,
            )
        ]
    from transformers import AutoTokenizer

    group, tokenizer = groups[0], AutoTokenizer.from_pretrained(model)
    scores = ", ".join(f"{score:g}" for score in group["scores"])
    invalid = int(counts.get("invalid_rollouts", 0))
    message = f"{len(group['scores'])} answers scored {scores}"
    if invalid:
        message += f"; {invalid} of them invalid: {errors}"
    if not invalid and not any(group["scores"]):
        message += ", as is usual for a model that does not know the task"
    tokens = _check_tokens(group)
    results = [CheckResult("rollout", "warned" if invalid else "passed", message, seconds), tokens]
    if tokens.status != "failed":
        results += [
            _check_round_trip(group, tokenizer),
            _check_stop_tokens(group, tokenizer.eos_token_id),
        ]
    return [*results, _check_truncation(counts)]


def _format_errors(counts: Json) -> str:
    return "; ".join(
        f"{text} ({count} times)" for text, count in (counts.get("errors") or {}).items()
    )


def _check_tokens(group: Mapping[str, Any]) -> CheckResult:
    """Find what the trainer would refuse, and what it could not learn from."""
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
    """Return what the trainer would refuse in one rollout, if anything."""
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


def _check_round_trip(group: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> CheckResult:
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


def _check_stop_tokens(group: Mapping[str, Any], eos_id: int | None) -> CheckResult:
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


def _check_truncation(counts: Json) -> CheckResult:
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
