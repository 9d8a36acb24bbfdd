"""Format the result of an inference test for a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.text import Text

from lachesis.base.json_text import Json
from lachesis.cli.console import (
    STATUS_STYLES,
    format_count,
    format_hours,
    format_score,
    format_share,
)
from lachesis.cli.layout import make_pairs_table

if TYPE_CHECKING:
    from lachesis.inference_tests.store import InferenceTest


SHOWN_STAGES = ("import", "config", "dataset", "model-free check")
_STAGE_MARKS = {"passed": "ok", "failed": "FAILED"}


def render_test(test: InferenceTest, next_command: str) -> RenderableType:
    """Return the result per model, the answers to prompts, and the next step if a model can
    learn.
    """
    if test.result is None:
        return Text(f"the test failed: {test.error}", style="red")
    stages = " · ".join(
        f"{stage.name} {_STAGE_MARKS.get(stage.status, stage.status)}"
        for stage in test.stages
        if stage.name in SHOWN_STAGES
    )
    rows: list[tuple[str, str | Text]] = [("stages", Text(stages, style="dim"))]
    for model in test.result["models_tested"]:
        rows.append((model["name"], _describe_result(model)))
        rows += [("", line) for line in _list_model_lines(model)]
    summary = test.result["summary"]
    if summary.get("forecast"):
        rows.append(("forecast", format_forecast(summary["forecast"])))
    if (cost := summary.get("cost_usd")) is not None:
        rows.append(("cost", f"{cost:.2g} US dollars for this test"))
    rows.append(("files", Text(summary["output_directory"], style="dim")))
    if summary.get("verdict") == "learnable":
        rows.append(("next", f"`{next_command}`"))
    return make_pairs_table(rows)


def _describe_result(model: Json) -> Text:
    """Return the verdict of one model with its numbers, or its error."""
    verdict = model.get("verdict") or {}
    word = verdict.get("word", "")
    text = Text(word, style=STATUS_STYLES.get(word, "yellow"))
    share = format_share(model["accuracy"], model.get("accuracy_interval"))
    numbers = (
        f"\nscore above 0: {model['correct_completions']} of {model['total_completions']} answers "
        f"in {model['steps_tested']} groups, {share}"
    )
    zero_signal_share = verdict.get("zero_signal_share")
    if zero_signal_share is not None:
        numbers += f"; {zero_signal_share:.0%} of the groups without a signal"
    text.append(numbers, style="none")
    error = str(model.get("error") or "").split("\n")[0]
    if error:
        text.append(f"\n{error}", style="red")
    return text


def _list_model_lines(model: Json) -> list[str]:
    """Return the evidence of a model's verdict, and its answers to the user's prompts."""
    lines = [
        sentence
        for sentence in (model.get("verdict") or {}).get("evidence", [])
        if sentence != model.get("error")
    ]
    for prompt in model.get("prompts", []):
        responses = "; ".join(
            f"{response['text']!r} {format_score(response['score'])}"
            for response in prompt["responses"]
        )
        note = _format_note(prompt)
        lines.append(f"{prompt['prompt']!r} -> {responses}{note}")
    return lines


def format_forecast(forecast: Json) -> str:
    """Return one sentence with the steps, tokens, hours and price that a training would take."""
    tokens, hours, cost = forecast["tokens"], forecast["hours"], forecast.get("cost_usd")
    if cost:
        money = f"{cost['low']:,.2f} to {cost['high']:,.2f} US dollars"
    else:
        money = "no price known for the base model"
    planned = forecast["planned"]
    plan_text = f"{planned['total_steps']} steps of {planned['batch_size']} rollouts"
    training = f"{format_hours(hours['low'])} to {format_hours(hours['high'])} of training"
    token_range = f"{format_count(tokens['low'])} to {format_count(tokens['high'])} tokens"
    return f"{plan_text} take {token_range}, {training}, {money}"


def _format_note(prompt: Json) -> str:
    if prompt.get("note"):
        return f" [{prompt['note']}]"
    return ""
