"""Compute the result of an inference test from what its environment has written."""

from pathlib import Path

from lachesis.base.json_text import Json
from lachesis.base.reward_values import is_score
from lachesis.config.prices import TokenCounts, find_prices
from lachesis.inference_tests.forecast import Forecast, GroupSums, GroupUsage
from lachesis.inference_tests.store import (
    DEFAULT_MODELS,
    EMBEDDED,
    TINKER,
    InferenceTest,
    get_model_name,
    read_groups,
    shorten_model_name,
)
from lachesis.inference_tests.verdict import InferenceCounts, Verdict
from lachesis.inference_tests.verdict import choose_best_word as best_word
from lachesis.runs.held_out_results import compute_interval


def make_model_result(
    output: Path,
    model: str,
    wandb_run: str,
    *,
    error: str | None,
    prompts: bool,
    verdict: Verdict | None = None,
    usage: GroupSums | None = None,
    forecast: Forecast | None = None,
    cost_usd: float | None = None,
) -> Json:
    """Return the result of one model, with its verdict and forecast."""
    lines = read_groups(output)
    title, scale = _describe_model(model)
    result: Json = {
        "model": model,
        "name": title,
        "scale": scale,
        "wandb_run": wandb_run,
        "output_file": str(output),
        "log_file": str(output.with_suffix(".log")),
        **_summarize_steps(lines),
    }
    if prompts:
        result["prompts"] = [_make_answered_prompt(line) for line in lines]
    # What is not known is absent.
    optional = {
        "verdict": verdict and verdict.model_dump(mode="json"),
        "usage": usage and usage.model_dump(mode="json"),
        "forecast": forecast and forecast.model_dump(mode="json"),
        "cost_usd": cost_usd,
        "error": error or None,
    }
    return {**result, **{key: value for key, value in optional.items() if value is not None}}


def compute_test_cost(model: str, counts: Json | None, home: Path) -> float | None:
    """Return the cost of testing one model in US dollars.

    None for a model of this machine, of an endpoint, or without a known price.
    """
    prices = find_prices(get_model_name(model), home) if model.startswith(TINKER) else None
    if prices is None:
        return None
    tokens = TokenCounts(
        prefill=(counts or {}).get("prompt_tokens", 0),
        sampled=(counts or {}).get("sampled_tokens", 0),
    )
    return round(prices.compute_cost(tokens), 6)


def _describe_model(model: str) -> tuple[str, str]:
    """Return the title and the scale of a model."""
    for name, title, scale in DEFAULT_MODELS:
        if name == model:
            return title, scale
    places = {EMBEDDED: "embedded", TINKER: "tinker"}
    scale = next((word for prefix, word in places.items() if model.startswith(prefix)), "custom")
    return shorten_model_name(model), scale


def _summarize_steps(lines: list[Json]) -> Json:
    """Return the steps with their totals; a share has the interval of the mean over groups."""
    steps = [
        _make_step(index, [float(score) for score in line["scores"] if is_score(score)])
        for index, line in enumerate(lines, 1)
    ]
    num_completions = sum(step["completions"] for step in steps)
    num_correct = sum(step["correct"] for step in steps)
    num_successful_steps = sum(step["correct"] > 0 for step in steps)
    sum_of_shares = sum(
        step["correct"] / step["completions"] for step in steps if step["completions"]
    )
    return {
        "steps": steps,
        "steps_tested": len(steps),
        "total_completions": num_completions,
        "correct_completions": num_correct,
        "accuracy": round(num_correct / num_completions, 3) if num_completions else 0.0,
        "steps_with_correct": num_successful_steps,
        "step_success_rate": round(num_successful_steps / len(steps), 3) if steps else 0.0,
        "accuracy_interval": _make_group_interval(sum_of_shares, steps),
        "step_success_interval": _make_group_interval(num_successful_steps, steps),
    }


def collect_inference_counts(output: Path, environment_counts: Json | None) -> InferenceCounts:
    """Return the counts of a test of a model: scores per group, failures, truncated answers."""
    counts = environment_counts or {}
    scores = [
        [float(score) for score in line["scores"] if is_score(score)]
        for line in read_groups(output)
    ]
    return InferenceCounts(
        scores_P=scores,
        empty=int(counts.get("empty_groups", 0)),
        invalid=int(counts.get("invalid_rollouts", 0)),
        completions=int(counts.get("completions", 0)),
        truncated=int(counts.get("truncated", 0)),
        errors=counts.get("errors") or {},
    )


def measure_groups(output: Path, environment_counts: Json | None) -> list[GroupUsage]:
    """Return the usage of each group: rollouts, tokens and seconds."""
    scores = [line["scores"] for line in read_groups(output)]
    usages = []
    for index, group_counts in enumerate((environment_counts or {}).get("per_group") or []):
        has_signal = index < len(scores) and len(set(scores[index])) > 1
        completions_per_prompt = max(
            1.0, group_counts["completions"] / max(1, group_counts["requests"])
        )
        numbers = {
            "prefill": group_counts["prompt_tokens"],
            "sampled": group_counts["sampled_tokens"],
            "seconds": group_counts["seconds"],
        }
        usages.append(
            GroupUsage(
                rollouts=int(group_counts["rollouts"]),
                completions_per_prompt=completions_per_prompt,
                has_signal=has_signal,
                **numbers,
            )
        )
    return usages


def read_samples(file: Path) -> list[Json]:
    """Return the first groups that were sampled: `prompt`, `responses` and `scores`."""
    return [group for group in read_groups(file) if isinstance(group.get("responses"), list)]


def make_test_result(record: InferenceTest, models: list[Json], folder: Path) -> Json:
    """Return the result of the test over all models."""
    request = record.request
    succeeded = [result for result in models if result["steps_tested"] and "error" not in result]
    best_result = max(succeeded, key=lambda result: result["accuracy"], default=None)
    per_model = request.spec.num_groups * request.spec.group_size
    words = [result["verdict"]["word"] for result in models if "verdict" in result]
    forecast = (best_result or {}).get("forecast")
    verdict_entry = {"verdict": best_word(words)} if words else {}
    costs = [result["cost_usd"] for result in models if "cost_usd" in result]
    return {
        "environment": request.environment,
        "environment_file": request.environment_file,
        "test_config": {
            "num_steps": request.spec.num_groups,
            "group_size": request.spec.group_size,
            "rollouts_per_model": per_model,
            "total_rollouts": per_model * len(request.models),
        },
        "models_tested": models,
        "summary": {
            "steps_requested": request.spec.num_groups,
            "models_tested": len(models),
            "models_succeeded": len(succeeded),
            "best_model": best_result["model"] if best_result else None,
            "avg_accuracy": round(
                sum(result["accuracy"] for result in succeeded) / len(succeeded), 3
            )
            if succeeded
            else 0.0,
            "environment_working": bool(succeeded),
            "output_directory": str(folder),
            **verdict_entry,
            **({"cost_usd": round(sum(costs), 6)} if costs else {}),
            **({"forecast": forecast} if forecast else {}),
        },
    }


def _make_step(number: int, scores: list[float]) -> Json:
    return {
        "step": number,
        "completions": len(scores),
        "correct": sum(score > 0 for score in scores),
        "scores": scores,
    }


def _make_group_interval(successes: float, steps: list[Json]) -> Json | None:
    """Return the 95 % interval of a share over the groups that have answers, or None without any.

    Answers to one item are not independent, so the number of groups counts.
    """
    answered = [step for step in steps if step["completions"]]
    if answered:
        return compute_interval(successes / len(answered), len(answered))
    return None


def _make_answered_prompt(line: Json) -> Json:
    """Return a user's prompt with its answers, their scores, and a note if there is any."""
    responses = [
        {"text": text, "score": score}
        for text, score in zip(line["responses"], line["scores"], strict=True)
    ]
    return {
        "prompt": line["prompt"],
        "responses": responses,
        **({"note": line["note"]} if line.get("note") else {}),
    }
