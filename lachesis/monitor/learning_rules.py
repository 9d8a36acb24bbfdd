"""Judge whether a run learns: one word, the numbers behind it, and what to do about it.

The functions are pure functions of the run's metrics and counts. The words, from good to bad, are
`healthy`; `too early` (too few steps so far) and `unknown` (the run ended before it could be
judged), which make no statement; `not learning` and `suspect`, which ask a person to look; and
`broken`. A word is advice. Only `broken` stops a run, and only if `limits.on_learning_failure` is
`stop`.
"""

from collections.abc import Callable, Sequence

from lachesis.monitor.answer_detectors import (
    advise_more_signal,
    count_invalid_since_last_step,
    describe_invalid_reasons,
    find_dropped_rollouts,
    find_entropy_collapse,
    find_invalid_rollouts,
    find_length_drift,
    find_truncation,
    find_zero_signal,
)
from lachesis.monitor.reward_detectors import (
    find_environment_without_reward,
    find_flat_reward,
    find_generalization_gap,
    find_held_out_drop,
    find_reward_drop,
)
from lachesis.monitor.reward_trend import WINDOW, Trend
from lachesis.monitor.run_history import (
    MIN_JUDGED_STEPS,
    SEVERITY,
    Finding,
    RunFacts,
    RunHealth,
    RunHistory,
    Step,
    compute_recent_mean,
)
from lachesis.monitor.weight_detectors import (
    find_logprob_gap,
    find_non_finite_loss,
    find_unchanged_weights,
)
from lachesis.runs.suggested_commands import format_command

# Batches' worth of unused rollouts before the first step that count as a sign of trouble.
MIN_WASTED_BATCHES = 3


def judge_learning(
    steps: Sequence[Step],
    *,
    first_steps: Sequence[Step] | None = None,
    trend: Trend | None = None,
    facts: RunFacts | None = None,
) -> RunHealth:
    """Judge a run by its last steps and by the sums over all of its steps.

    Args:
        steps: Metrics of successive steps, in order; at least the last `WINDOW` steps.
        first_steps: Metrics of the first `WINDOW` steps; by default the first ones of `steps`.
        trend: The sums over all steps; by default the sums over `steps`.
        facts: What else is known about the run.

    Returns:
        The word, with its evidence and advice.
    """
    if trend is None:
        trend = Trend()
        trend.add(steps)
    history = RunHistory(steps, first_steps or steps[:WINDOW], trend, facts or RunFacts())
    if len(steps) < MIN_JUDGED_STEPS:
        return _judge_few_steps(history)
    findings = [finding for detector in DETECTORS if (finding := detector(history)) is not None]
    if not findings:
        return RunHealth(word="healthy", evidence=[_summarize_steps(steps)])
    return _combine_findings(findings)


def _combine_findings(findings: list[Finding]) -> RunHealth:
    """Return one judgement from the findings, the most severe finding first.

    Among those of one severity the likeliest cause is first; see `lachesis.monitor.learning_rules`.
    """
    ordered = sorted(findings, key=lambda finding: -SEVERITY[finding.word])
    return RunHealth(
        word=ordered[0].word,
        evidence=[finding.evidence for finding in ordered],
        # Several signs of one collapse have the same remedy.
        advice=list(dict.fromkeys(finding.advice for finding in ordered)),
    )


def _judge_few_steps(history: RunHistory) -> RunHealth:
    """Judge a run that has too few steps by what its environments have counted."""
    findings = [
        finding
        for detector in (find_only_invalid_rollouts, find_only_dropped_groups)
        if (finding := detector(history)) is not None
    ]
    if findings:
        return _combine_findings(findings)
    facts, num_steps = history.facts, len(history.last_steps)
    invalid = count_invalid_since_last_step(history)[0]
    parts = [f"{num_steps} of at least {MIN_JUDGED_STEPS} steps"]
    if invalid:
        parts += [f"{invalid:.0f} rollouts had no usable score{describe_invalid_reasons(history)}"]
    if not facts.has_ended:
        return RunHealth(word="too early", evidence=["; ".join(parts)])
    end = "was stopped" if facts.status == "stopped" else facts.status
    ending = f"it {end} after {'; '.join(parts)}"
    error_lines = (facts.error or "").strip().splitlines()
    return RunHealth(word="unknown", evidence=[ending, *error_lines[:1]])


def find_only_invalid_rollouts(history: RunHistory) -> Finding | None:
    """Find an environment whose rollouts have no usable score, so that no batch can be made."""
    invalid, share = count_invalid_since_last_step(history)
    if (
        not history.facts.batch_size
        or invalid < MIN_WASTED_BATCHES * history.facts.batch_size
        or share < 0.8
    ):
        return None
    return Finding(
        word="broken",
        evidence=f"{share:.0%} of {invalid / share:,.0f} rollouts had no usable "
        f"score{describe_invalid_reasons(history)}",
        advice=f"{history.facts.format_stop_prefix()}look in "
        f"{history.facts.format_logs_command('env')} for what the environment raises, "
        f"and check it: `{format_command('env', 'check', history.facts.environment)}`",
    )


def find_only_dropped_groups(history: RunHistory) -> Finding | None:
    """Find an environment that drops all of its groups, so that no batch can be made."""
    facts = history.facts
    dropped = float(facts.environment_counts.get("dropped_rollouts") or 0)
    if (
        history.last_steps
        or not facts.batch_size
        or dropped < MIN_WASTED_BATCHES * facts.batch_size
    ):
        return None
    return Finding(
        word="suspect",
        evidence=f"no step was made: the environment has left out {dropped:,.0f} rollouts, which "
        f"make {dropped / facts.batch_size:.0f} batches, as the rewards of a group were equal (or "
        f"for "
        f"their length)",
        advice=advise_more_signal(history),
    )


def _summarize_steps(steps: Sequence[Step]) -> str:
    """Return the sentence that a run without findings is judged by."""
    reward, zero_signal_share = (
        compute_recent_mean(steps, "reward/mean"),
        compute_recent_mean(steps, "batch/zero_signal_share"),
    )
    if reward is None:
        parts = []
    else:
        parts = [f"mean reward {reward:.3f} over the last {min(WINDOW, len(steps))} steps"]
    if zero_signal_share is not None:
        parts += [f"{zero_signal_share:.0%} of groups without a signal"]
    return ", ".join(parts) or "nothing unusual"


# Causes before their effects: updates and rollouts that go wrong, the policy that they spoil, and
# the missing signal that follows.
DETECTORS: tuple[Callable[[RunHistory], Finding | None], ...] = (
    find_unchanged_weights,
    find_non_finite_loss,
    find_logprob_gap,
    find_invalid_rollouts,
    find_truncation,
    find_reward_drop,
    find_entropy_collapse,
    find_held_out_drop,
    find_environment_without_reward,
    find_zero_signal,
    find_dropped_rollouts,
    find_length_drift,
    find_generalization_gap,
    find_flat_reward,
)
