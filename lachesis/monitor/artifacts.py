"""Render Markdown and tables for the Prefect UI.

Text from a model or an environment is escaped, so that it cannot become markup.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

from lachesis.base.json_text import Json
from lachesis.inference_tests.store import InferenceTest

MAX_CELL_CHARS = 600


def render_validation(test: InferenceTest, samples: Mapping[str, Sequence[Json]]) -> str:
    """Return the report of a validation: verdict, stages, models, forecast, and scored
    completions.
    """
    summary = (test.result or {}).get("summary", {})
    word = summary.get("verdict") or (
        "works" if summary.get("environment_working") else "could not be tested"
    )
    lines = [
        f"# {escape_cell(test.request.environment)}: {word}",
        "",
        f"Test {test.test_id}, code {test.fingerprint}.",
        "",
    ]
    lines += render_table(
        ["stage", "result", "seconds", "what"],
        [_make_stage_row(stage) for stage in test.model_dump()["stages"]],
    )
    models = (test.result or {}).get("models_tested", [])
    model_rows = [list(row.values()) for row in make_model_rows(test)]
    lines += ["", "## Models", "", *render_table(list(_MODEL_COLUMNS), model_rows)]
    for model_result in models:
        for sentence in (model_result.get("verdict") or {}).get("evidence", []):
            lines.append(f"- {escape_cell(model_result['name'])}: {escape_cell(sentence)}")
    lines += render_forecast(summary.get("forecast"))
    for model, groups in samples.items():
        lines += ["", f"## Answers of {escape_cell(model)}", ""]
        for group in groups:
            lines += _render_answers(group)
    return "\n".join(lines)


def _render_answers(group: Json) -> list[str]:
    """Return the prompt of a group with a few of its answers and their scores."""
    pairs = list(zip(group["responses"], group["scores"], strict=False))[:4]
    rows = [[_format_number(score), str(text)] for text, score in pairs]
    prompt = escape_cell(str(group.get("prompt")))
    return [f"**{prompt}**\n", *render_table(["score", "response"], rows), ""]


_MODEL_COLUMNS = (
    "model",
    "verdict",
    "accuracy",
    "items",
    "95 % interval",
    "reward",
    "spread",
    "no signal",
    "truncated",
    "invalid",
    "error",
)


def make_model_rows(test: InferenceTest) -> list[Json]:
    """Return one table row per model."""
    rows = []
    for model_result in (test.result or {}).get("models_tested", []):
        verdict = model_result.get("verdict") or {}
        keys = (
            "reward_mean",
            "reward_spread",
            "zero_signal_share",
            "truncation_rate",
            "invalid_rate",
        )
        interval = model_result.get("accuracy_interval") or {}
        if interval:
            interval_text = f"{interval['low']:.3f} to {interval['high']:.3f}"
        else:
            interval_text = None
        values = [
            model_result["name"],
            verdict.get("word"),
            model_result["accuracy"],
            interval.get("items"),
            interval_text,
            *(verdict.get(key) for key in keys),
        ]
        error = str(model_result.get("error", "")).split("\n")[0][:200]
        rows.append(dict(zip(_MODEL_COLUMNS, [*map(format_value, values), error], strict=True)))
    return rows


# Title, field and decimals of each row in the table of a forecast.
FORECAST_ROWS = (("tokens", "tokens", 0), ("hours", "hours", 3), ("US dollars", "cost_usd", 2))


def render_forecast(forecast: Json | None) -> list[str]:
    """Return the lines of a forecast's table."""
    if not forecast:
        return []
    rows = [
        [name, *(f"{forecast[key][end]:,.{digits}f}" for end in ("low", "expected", "high"))]
        for name, key, digits in FORECAST_ROWS
        if forecast.get(key)
    ]
    planned = forecast["planned"]
    plan = f"{planned['total_steps']} steps of {planned['batch_size']} rollouts"
    return [
        "",
        f"## Forecast for {plan}",
        "",
        *render_table(["", "low", "expected", "high"], rows),
        "",
        f"From {escape_cell(forecast['basis'])}.",
    ]


def _make_stage_row(stage: Json) -> list[str]:
    return [stage["name"], stage["status"], f"{stage['seconds']:.1f}", stage["message"] or ""]


def render_table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    """Return a Markdown table with escaped cells."""
    if not rows:
        return []
    lines = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    return lines + [
        f"| {' | '.join(escape_cell(format_value(value)) for value in row)} |" for row in rows
    ]


def escape_cell(text: object) -> str:
    """Return text for one line of Markdown: short and without markup."""
    plain = " ".join(str(text).split())
    if len(plain) <= MAX_CELL_CHARS:
        short = plain
    else:
        short = f"{plain[:MAX_CELL_CHARS]}…"
    escaped = html.escape(short, quote=False)
    return "".join(
        f"\\{character}" if character in "\\`*_[]|#~" else character for character in escaped
    )


def format_value(value: object) -> str:
    """Return the text of a cell; a dash for a value that is missing."""
    if value is None:
        return "–"
    if isinstance(value, float):
        return _format_number(value)
    return str(value)


def _format_number(value: object) -> str:
    if value is None:
        return "–"
    return f"{value:.4g}"
