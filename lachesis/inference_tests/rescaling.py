"""Scale the forecast of a test to a run with other numbers of steps, rollouts and evaluations."""

from __future__ import annotations

from lachesis.config.prices import Prices, TokenCounts
from lachesis.inference_tests.forecast import (
    Forecast,
    PlannedRun,
    Range,
    add_evaluation_tokens,
    forecast_storage,
    make_range,
)


def rescale_forecast(
    forecast: Forecast,
    planned: PlannedRun,
    prices: Prices | None = None,
    storage_price: float | None = None,
) -> Forecast:
    """Return the forecast for a run with other numbers of steps, rollouts and evaluations, another
    group size, or with or without a KL penalty.
    """
    old_tokens = forecast.tokens_per_rollout
    prefill = old_tokens.prefill * (
        forecast.planned.group_size / planned.group_size if forecast.prompt_is_shared else 1.0
    )
    tokens = old_tokens.model_copy(update={"prefill": round(prefill, 2)})
    if planned.has_kl_penalty and not forecast.planned.has_kl_penalty:
        sequence_tokens = max(forecast.sequence_tokens, tokens.trained)
        tokens = tokens.model_copy(
            update={"prefill": tokens.prefill + sequence_tokens, "trained": sequence_tokens}
        )
    rollout_factor = planned.num_rollouts / forecast.planned.num_rollouts
    # Kinds of tokens have different prices, so money and tokens do not grow by the same factor.
    new_totals, old_totals = (
        _count_run_tokens(tokens, planned),
        _count_run_tokens(old_tokens, forecast.planned),
    )
    token_factor = cost_factor = new_totals.total / max(old_totals.total, 1e-9)
    if prices and (old_cost := prices.compute_cost(old_totals)) > 0:
        cost_factor = prices.compute_cost(new_totals) / old_cost
    ranges = {
        name: Range(
            **{
                key: round(getattr(old_range, key) * factor, 4)
                for key in ("low", "expected", "high")
            }
        )
        for name, factor in (
            ("tokens", token_factor),
            ("hours", rollout_factor),
            ("cost_usd", cost_factor),
        )
        if (old_range := getattr(forecast, name)) is not None
    }
    return forecast.model_copy(
        update={
            "planned": planned,
            "tokens_per_rollout": tokens,
            "evaluation_cost_usd": _rescale_evaluation_cost(tokens, planned, prices, ranges),
            **forecast_storage(planned, storage_price),
            **ranges,
        }
    )


def _rescale_evaluation_cost(
    per_rollout: TokenCounts,
    planned: PlannedRun,
    prices: Prices | None,
    ranges: dict[str, Range],
) -> Range | None:
    """Return the cost of all evaluations, with the same relative width as that of the run."""
    run_cost = ranges.get("cost_usd")
    if prices is None or run_cost is None or run_cost.expected <= 0:
        return None
    tokens = add_evaluation_tokens(TokenCounts(), per_rollout, planned.num_evaluation_answers)
    expected = prices.compute_cost(tokens)
    factors = (run_cost.low / run_cost.expected, 1.0, run_cost.high / run_cost.expected)
    return make_range([expected * factor for factor in factors], digits=4)


def _count_run_tokens(per_rollout: TokenCounts, planned: PlannedRun) -> TokenCounts:
    """Return the tokens of all rollouts and of all evaluations, which train on nothing."""
    num_answers = planned.num_rollouts + planned.num_evaluation_answers
    return TokenCounts(
        prefill=num_answers * per_rollout.prefill,
        sampled=num_answers * per_rollout.sampled,
        trained=planned.num_rollouts * per_rollout.trained,
    )
