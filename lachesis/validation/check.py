"""`lachesis env check`: everything about an environment that can be known in half a minute, without a Prefect server.

import, config, dataset, model-free check
               as in a validation; see `lachesis.env_process.stages`
rollout        a group of answers of a local model, scored
tokens         what would be trained on: lengths, masks, log-probabilities
round trip     the prompt's ids are those of its text
stop tokens    answers end with one, and no turn ends twice
truncation     the limit of tokens does not cut the answers
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lachesis.base.errors import LachesisError, StageError
from lachesis.base.files import write_private
from lachesis.base.json_lines import read_json_lines
from lachesis.catalog.scan import Environment
from lachesis.config.run_config import RunConfig
from lachesis.env_process.stages import STAGE_NAMES
from lachesis.runs.environment_counts import read_counts
from lachesis.supervision.group import ServiceGroup
from lachesis.supervision.health import wait_until_ended
from lachesis.supervision.plan import make_inference_test_spec
from lachesis.supervision.trial import StageChild, serve_base_model
from lachesis.validation.tests import InferenceRequest, probe_config

Json = dict[str, Any]
GROUP = 8
ROLLOUT_S = 120.0
MANY_CUT = 0.5
TOLD = {
    "dataset": "{items} items tried, {distinct} different",
    "model-free check": "{gold_right} of {items} right answers score as right, {corrupt_wrong} spoilt ones as less",
}
Status = Literal["passed", "warned", "failed", "not offered"]


@dataclass(frozen=True)
class Line:
    """One check and what came of it."""

    name: str
    status: Status
    message: str
    seconds: float = 0.0


Tell = Callable[[Line], None]


def check(environment: Environment, config: RunConfig, folder: Path, tell: Tell = lambda line: None) -> list[Line]:
    """Go through all checks, until one fails after which the others make no sense. Each is told as soon as it is known.
    `folder` is empty, and holds the logs afterwards."""
    lines: list[Line] = []

    def add(line: Line) -> bool:
        lines.append(line)
        tell(line)
        return line.status != "failed"

    with ServiceGroup() as group:
        child = StageChild(group, environment.file_path, environment.class_name, config, folder)
        going = all(add(_stage(child, name)) for name in STAGE_NAMES)
    if going:
        started = time.monotonic()
        try:
            groups, tally = _roll_out(environment, config, folder)
        except LachesisError as error:
            told = _errors(read_counts(folder / "tally.json") or {})
            known = f"{told}; the traceback is in {folder / 'rollout.log'}" if told else str(error)
            add(Line("rollout", "failed", known, time.monotonic() - started))
            return lines
        for line in _look(groups, tally, config.openai.model_name, time.monotonic() - started):
            add(line)
    return lines


def _stage(child: StageChild, name: str) -> Line:
    started = time.monotonic()
    try:
        found = child.wait_for_stage(name).get("detail") or {}
    except StageError as error:
        return Line(name, "failed", str(error), time.monotonic() - started)
    seconds = time.monotonic() - started
    if found.get("faults"):
        return Line(name, "failed", "; ".join(found["faults"]), seconds)
    if found.get("offered") is False:
        return Line(name, "not offered", f"the class has no {', '.join(found['missing'])}", seconds)
    return Line(name, "passed", TOLD.get(name, "").format(**found), seconds)


def _roll_out(environment: Environment, config: RunConfig, folder: Path) -> tuple[list[Json], Json]:
    """One group of the model's answers, as the environment would send it, and what was counted meanwhile."""
    output = folder / "rollout.jsonl"
    request = InferenceRequest(
        environment=environment.name, environment_file=environment.file_path, models=[], num_steps=1, group_size=GROUP
    )
    with ServiceGroup() as group:
        plan = serve_base_model(group, config, config.openai.model_name, folder / "server")
        content = probe_config(plan.config, request, output, plan.config.openai.model_dump(mode="json"), "check")
        places = {"out": output, "tally": folder / "tally.json", "samples": folder / "samples.jsonl"}
        spec = {**{name: str(place) for name, place in places.items()}, "wandb_run": "check"}
        probe, files = make_inference_test_spec(environment.file_path, content, output, spec, client_env=plan.client_env, timeout_s=ROLLOUT_S)
        for path, text in files.items():
            write_private(path, text)
        group.start(probe)
        wait_until_ended(group, probe, needs=[])
    return read_json_lines(output), read_counts(folder / "tally.json") or {}


def _look(groups: list[Json], tally: Json, model: str, seconds: float) -> list[Line]:
    errors = _errors(tally)
    if not groups:
        return [Line("rollout", "failed", f"no group came: {errors or 'the environment left it out'}", seconds)]
    from transformers import AutoTokenizer

    group, tokenizer = groups[0], AutoTokenizer.from_pretrained(model)
    scores = ", ".join(f"{score:g}" for score in group["scores"])
    invalid = int(tally.get("invalid", 0))
    told = f"{len(group['scores'])} answers scored {scores}{f'; {invalid} of them invalid: {errors}' if invalid else ''}"
    if not invalid and not any(group["scores"]):
        told += ", as is usual for a model that does not know the task"
    tokens = _tokens(group)
    lines = [Line("rollout", "warned" if invalid else "passed", told, seconds), tokens]
    if tokens.status != "failed":
        lines += [_round_trip(group, tokenizer), _stops(group, tokenizer.eos_token_id)]
    return [*lines, _truncation(tally)]


def _errors(tally: Json) -> str:
    return "; ".join(f"{text} ({count} times)" for text, count in (tally.get("errors") or {}).items())


def _tokens(group: Mapping[str, Any]) -> Line:
    """What the trainer refuses, and what it would learn nothing from."""
    logprobs_G = group.get("inference_logprobs")
    if not logprobs_G:
        logprobs_G = [[0.0] * len(tokens) for tokens in group["tokens"]]
    trained = 0
    for index, (tokens, masks, logprobs) in enumerate(zip(group["tokens"], group["masks"], logprobs_G, strict=False)):
        if not len(tokens) == len(masks) == len(logprobs):
            lengths = f"{len(tokens)} tokens, {len(masks)} masks and {len(logprobs)} logprobs"
            return Line("tokens", "failed", f"rollout {index} has {lengths}; the three must have one length")
        for place, (token, mask, logprob) in enumerate(zip(tokens, masks, logprobs, strict=True)):
            if mask not in (-100, token):
                return Line(
                    "tokens", "failed", f"rollout {index} has a mask {mask} at token {token}; allowed: -100 and the token"
                )
            if place and mask != -100 and not logprob <= 0.01:  # nothing comes before the first token
                return Line(
                    "tokens", "failed", f"rollout {index} has a log-probability of {logprob} at a token to be trained on"
                )
            trained += mask != -100
    if not trained:
        return Line("tokens", "failed", "every token is masked with -100: nothing would be trained on")
    told = f"{trained} of {sum(map(len, group['tokens']))} would be trained on: those that the model has said"
    if not group.get("inference_logprobs"):
        lack = (
            "the group has no inference_logprobs, so that the trainer asks the model for them; node.logprobs has the true ones"
        )
        return Line("tokens", "warned", f"{told}; {lack}")
    return Line("tokens", "passed", told)


def _round_trip(group: Mapping[str, Any], tokenizer: Any) -> Line:
    """The first prompt's ids, against those of its text."""
    masks = group["masks"][0]
    prompt = group["tokens"][0][: next((at for at, mask in enumerate(masks) if mask != -100), len(masks))]
    again = tokenizer.encode(tokenizer.decode(prompt), add_special_tokens=False)
    if prompt != again:
        return Line(
            "round trip", "warned", f"the prompt has {len(prompt)} ids; its text, tokenised again, has {len(again)}, or others"
        )
    return Line("round trip", "passed", f"the prompt's {len(prompt)} ids are those of its text")


def _stops(group: Mapping[str, Any], eos: int | None) -> Line:
    ended = sum(_last_trained(masks) == eos for masks in group["masks"])
    doubled = sum(
        a == b == eos and (first, second) == (eos, -100)
        for tokens, masks in zip(group["tokens"], group["masks"], strict=True)
        for a, b, first, second in zip(tokens, tokens[1:], masks, masks[1:], strict=False)
    )
    told = f"{ended} of {len(group['masks'])} answers end with the end-of-turn token, which is trained on"
    if doubled:
        return Line(
            "stop tokens", "warned", f"{told}; {doubled} turns end twice, which the trainer mends (take ConversationEnv)"
        )
    return Line("stop tokens", "passed" if ended else "warned", told)


def _last_trained(masks: list[int]) -> int | None:
    return next((mask for mask in reversed(masks) if mask != -100), None)


def _truncation(tally: Json) -> Line:
    cut, count = int(tally.get("truncated", 0)), int(tally.get("completions", 0))
    told = f"{cut} of {count} answers were cut off at their limit of tokens"
    return Line("truncation", "warned" if count and cut / count >= MANY_CUT else "passed", told)
