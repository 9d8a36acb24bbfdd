"""Judge whether a run learns: a word, the numbers behind it, and what to do. Pure functions on its
metrics and counts.

A process that lives may learn nothing. The words, from good to bad: `healthy`; `too early` (nothing
was measured yet) and `unknown` (the run ended before it could be judged), which say neither; `not
learning` and `suspect`, which ask a person to look; `broken`. A word is advice. Only `broken` stops
a run, and only where `limits.on_broken` is `stop`.
"""

from __future__ import annotations

from collections.abc import Sequence

from lachesis.monitor.course import GRAVITY, LEAST_STEPS, Course, Finding, Health, RunFacts, Step, mean
from lachesis.monitor.signs import SIGNS, invalid_since_last_step, reasons, what_gives_a_signal
from lachesis.monitor.trend import WINDOW, Trend

BATCHES = 3
"""Before the first step, so many batches' worth of rollouts without a use are a sign."""


def judge(
    steps: Sequence[Step],
    *,
    first: Sequence[Step] | None = None,
    trend: Trend | None = None,
    facts: RunFacts | None = None,
) -> Health:
    """Judge a run by its last steps and by the sums over all of them.

    Args:
        steps: Lines of the metrics in order, at least the last `WINDOW`.
        first: The first `WINDOW` steps; by default those of `steps`.
        trend: The sums over all steps; by default over `steps`.
        facts: What else is known about the run.
    """
    if trend is None:
        trend = Trend()
        trend.add(steps)
    course = Course(steps, first or steps[:WINDOW], trend, facts or RunFacts())
    if len(steps) < LEAST_STEPS:
        return _without_steps(course)
    findings = [finding for sign in SIGNS if (finding := sign(course)) is not None]
    if not findings:
        return Health(word="healthy", evidence=[_summary(steps)])
    return _health(findings)


def _health(findings: list[Finding]) -> Health:
    """Return the judgement with the gravest finding first, else in their order."""
    ordered = sorted(findings, key=lambda finding: -GRAVITY[finding.word])
    return Health(
        word=ordered[0].word,
        evidence=[finding.evidence for finding in ordered],
        advice=[finding.advice for finding in ordered],
    )


def _without_steps(course: Course) -> Health:
    """Judge a run with too few steps by what its environments have counted."""
    findings = [finding for sign in (all_invalid, all_alike) if (finding := sign(course)) is not None]
    if findings:
        return _health(findings)
    facts, made = course.facts, len(course.last)
    invalid = invalid_since_last_step(course)[0]
    parts = [f"{made} of at least {LEAST_STEPS} steps"]
    parts += [f"{invalid:.0f} rollouts had no usable score{reasons(course)}"] if invalid else []
    if not facts.ended:
        return Health(word="too early", evidence=["; ".join(parts)])
    how = f"it {'was stopped' if facts.status == 'stopped' else facts.status} after {'; '.join(parts)}"
    cause = (facts.error or "").strip().splitlines()
    return Health(word="unknown", evidence=[how, *cause[:1]])


def all_invalid(course: Course) -> Finding | None:
    """Find an environment whose rollouts have no usable score, so that no batch is made."""
    invalid, share = invalid_since_last_step(course)
    if not course.facts.batch_size or invalid < BATCHES * course.facts.batch_size or share < 0.8:
        return None
    return Finding(
        word="broken",
        evidence=f"{share:.0%} of {invalid / share:,.0f} rollouts had no usable score{reasons(course)}",
        advice=f"{course.facts.stop()}look in {course.facts.logs('env')} for what the environment raises, "
        f"and check it: `lachesis env check {course.facts.environment}`",
    )


def all_alike(course: Course) -> Finding | None:
    """Find an environment that leaves out all groups, so that no batch is made."""
    facts = course.facts
    dropped = float(facts.counts.get("dropped") or 0)
    if course.last or not facts.batch_size or dropped < BATCHES * facts.batch_size:
        return None
    return Finding(
        word="suspect",
        evidence=f"no step was made: the environment has left out {dropped:,.0f} rollouts, which make "
        f"{dropped / facts.batch_size:.0f} batches, as the rewards of a group were equal (or for their length)",
        advice=what_gives_a_signal(course),
    )


def _summary(steps: Sequence[Step]) -> str:
    """Return what a run without a sign of trouble is judged by."""
    reward, silent = mean(steps, "reward/mean"), mean(steps, "batch/zero_signal_share")
    parts = [] if reward is None else [f"mean reward {reward:.3f} over the last {min(WINDOW, len(steps))} steps"]
    parts += [] if silent is None else [f"{silent:.0%} of groups without a signal"]
    return ", ".join(parts) or "nothing unusual"
