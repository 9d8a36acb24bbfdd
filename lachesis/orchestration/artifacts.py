"""Markdown and tables for the Prefect UI. What came from a model or an environment is shown as text and cannot become
markup."""

from __future__ import annotations

import base64
import html
from collections.abc import Mapping, Sequence
from typing import Any

from lachesis.validation.tests import InferenceTest

Json = dict[str, Any]
MOST_TEXT = 600


def validation(test: InferenceTest, samples: Mapping[str, Sequence[Json]]) -> str:
    """Verdict, stages, models, forecast, and completions with their scores."""
    summary = (test.result or {}).get("summary", {})
    word = summary.get("verdict") or ("works" if summary.get("environment_working") else "could not be tested")
    lines = [f"# {cell(test.request.environment)}: {word}", "", f"Test {test.test_id}, code {test.fingerprint}.", ""]
    lines += table(["stage", "result", "seconds", "what"], [_stage(one) for one in test.model_dump()["stages"]])
    models = (test.result or {}).get("models_tested", [])
    lines += ["", "## Models", "", *table(list(_MODEL_COLUMNS), [list(one.values()) for one in models_table(test)])]
    for one in models:
        for sentence in (one.get("verdict") or {}).get("evidence", []):
            lines.append(f"- {cell(one['name'])}: {cell(sentence)}")
    lines += forecast(summary.get("forecast"))
    for model, groups in samples.items():
        lines += ["", f"## What {cell(model)} said", ""]
        for group in groups:
            lines.append(f"**{cell(str(group.get('prompt')))}**\n")
            pairs = zip(group["responses"], group["scores"], strict=False)
            lines += [*table(["score", "response"], [[_number(score), str(text)] for text, score in list(pairs)[:4]]), ""]
    return "\n".join(lines)


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


def models_table(test: InferenceTest) -> list[Json]:
    """One row per model."""
    rows = []
    for one in (test.result or {}).get("models_tested", []):
        verdict = one.get("verdict") or {}
        keys = ("reward_mean", "reward_spread", "zero_signal_share", "truncation_rate", "invalid_rate")
        interval = one.get("accuracy_interval") or {}
        sure = f"{interval['low']:.3f} to {interval['high']:.3f}" if interval else None
        values = [
            one["name"],
            verdict.get("word"),
            one["accuracy"],
            interval.get("items"),
            sure,
            *(verdict.get(key) for key in keys),
        ]
        error = str(one.get("error", "")).split("\n")[0][:200]
        rows.append(dict(zip(_MODEL_COLUMNS, [*map(_plain, values), error], strict=True)))
    return rows


def forecast(made: Json | None) -> list[str]:
    if not made:
        return []
    rows = [[name, *(f"{made[key][end]:,.{digits}f}" for end in ("low", "expected", "high"))]
            for name, key, digits in (("tokens", "tokens", 0), ("hours", "hours", 3), ("US dollars", "cost_usd", 2))
            if made.get(key)]  # fmt: skip
    planned = made["planned"]
    plan = f"{planned['total_steps']} steps of {planned['batch_size']} rollouts"
    return [
        "",
        f"## Forecast for {plan}",
        "",
        *table(["", "low", "expected", "high"], rows),
        "",
        f"From {cell(made['basis'])}.",
    ]


def _stage(stage: Json) -> list[str]:
    return [stage["name"], stage["status"], f"{stage['seconds']:.1f}", stage["message"] or ""]


def table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    """A Markdown table; nothing inside a cell can leave it."""
    if not rows:
        return []
    lines = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    return lines + [f"| {' | '.join(cell(_plain(value)) for value in row)} |" for row in rows]


def cell(text: Any) -> str:
    """Text for one line of Markdown: short, without markup of its own."""
    plain = " ".join(str(text).split())
    short = plain if len(plain) <= MOST_TEXT else f"{plain[:MOST_TEXT]}…"
    escaped = html.escape(short, quote=False)
    return "".join(f"\\{one}" if one in "\\`*_[]|#~" else one for one in escaped)


def _plain(value: Any) -> str:
    return "–" if value is None else _number(value) if isinstance(value, float) else str(value)


def _number(value: Any) -> str:
    return "–" if value is None else f"{value:.4g}"


def curve(values: Sequence[float | None], width: int = 640, height: int = 140) -> str:
    """A line over equal steps as a Markdown image, or "" for fewer than two values. Drawn here, as a picture of a plotting
    library takes a hundred times longer, and a look at all runs draws one for each."""
    known = [(index, value) for index, value in enumerate(values) if value is not None]
    if len(known) < 2:
        return ""
    low, high = min(value for _, value in known), max(value for _, value in known)
    room = (high - low) or 1.0
    x = [8 + (width - 64) * index / (len(values) - 1) for index, _ in known]
    y = [height - 12 - (height - 24) * (value - low) / room for _, value in known]
    points = " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(x, y, strict=True))
    labels = "".join(
        f'<text x="{width - 50}" y="{place}" font-size="12" font-family="sans-serif" fill="#666">{value:.3g}</text>'
        for value, place in ((high, 16), (low, height - 8))
    )
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}">'
        f'<rect width="{width}" height="{height}" fill="#fff"/>'
        f'<polyline fill="none" stroke="#2563eb" stroke-width="2" points="{points}"/>{labels}</svg>'
    )
    return f"![curve](data:image/svg+xml;base64,{base64.b64encode(svg.encode()).decode()})"
