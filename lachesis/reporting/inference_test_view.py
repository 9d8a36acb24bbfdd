"""Compute the verdict, shares, forecast and next step of an inference test once, for every surface.

A test says of each model how often it was right, whether its rewards differ inside groups, and what
a run would take; its verdict is that of the best model.
"""

from dataclasses import dataclass
from functools import cached_property

from pydantic import ValidationError

from lachesis.base.errors import StorageError, shorten
from lachesis.base.formatting import (
    MISSING,
    format_decimal,
    format_duration,
    format_percent,
    format_range,
    format_reward,
)
from lachesis.base.json_text import Json
from lachesis.environment_catalog.lookup import get_name_or_file
from lachesis.inference_tests.forecast import Forecast
from lachesis.inference_tests.results import read_samples
from lachesis.inference_tests.store import InferenceTest, InferenceTestStore, shorten_model_name
from lachesis.reporting.rollouts import AnswerColumn, build_answers
from lachesis.reporting.run_headline import write_sentence
from lachesis.reporting.verdict_marks import Mark, make_mark
from lachesis.runs.held_out_results import HeldOutPoint, describe_point
from lachesis.runs.suggested_commands import LaunchCommand, format_command

MAX_EXAMPLES, MAX_EVIDENCE_CHARS = 6, 160
_LEADS = {
    "learnable": "A model can learn from it.",
    "too easy": "It is too easy for these models.",
    "too hard": "It is too hard for these models.",
    "broken": "It is broken.",
    "failed": "It could not be tested.",
    "testing": "It is being tested.",
}
_NEXT_STEPS = {
    "broken": "fix what the stages, the errors and the verdicts name, then {test}",
    "too hard": "there is almost no reward to learn from: take easier items, a stronger model or "
    "a larger group_size, then {test}",
    "too easy": "nothing is left to learn: take harder items, then {test}",
}


@dataclass(frozen=True)
class Share:
    """Hold a share that a test has measured, from 0 to 1, with its 95 % interval or None."""

    name: str
    share: float
    low: float | None
    high: float | None
    items: str
    """Names the number and kind of the items, such as `n 8 groups`."""

    @property
    def interval(self) -> str:
        """Return the interval as text, or a dash."""
        if self.low is None or self.high is None:
            return MISSING
        return format_range(self.low, self.high, format_reward)

    def describe(self) -> str:
        """Return the share with its interval in words."""
        text = f"{self.name} {format_reward(self.share)}"
        details = ", ".join(
            part for part in (self.interval, self.items) if part not in ("", MISSING)
        )
        return f"{text} ({details})" if details else text


@dataclass(frozen=True)
class TestedModelView:
    """Hold the results of a test for one model."""

    __test__ = False  # pytest must not collect this class.

    model: str
    """The model as the test was given it."""
    name: str
    """The model's name, or the last part of its folder."""
    mark: Mark
    evidence: list[str]
    error: str
    """The first line of what has ended its test; empty without an error."""
    reward_mean: float | None
    num_answers: int
    shares: list[Share]
    summary: str
    """How many answers were right, and how many groups have no signal, in words."""
    answered_prompts: list[str]
    """The user's own prompts with the answers to each."""


class InferenceTestView:
    """Compute the parts of one test that surfaces lay out.

    Args:
        test: The test.
        store: The tests of its home, for the answers that were kept.
    """

    def __init__(self, test: InferenceTest, store: InferenceTestStore) -> None:
        self.test, self.store = test, store

    @property
    def result(self) -> Json:
        """Return the result; empty until the test has ended."""
        return self.test.result or {}

    @property
    def summary(self) -> Json:
        """Return the part of the result that is about all models."""
        return self.result.get("summary") or {}

    @property
    def mark(self) -> Mark:
        """Return the verdict with its shape and colour."""
        return choose_test_mark(self.test)

    @property
    def lead(self) -> str:
        """Return the verdict as a sentence."""
        return _LEADS.get(self.mark.word, "The models have answered.")

    @property
    def evidence(self) -> str:
        """Return the strongest evidence, or why the test failed; nothing if there is none."""
        if self.test.error:
            return shorten(self.test.error.splitlines()[0], MAX_EVIDENCE_CHARS)
        return next((model.evidence[0] for model in self.models if model.evidence), "")

    @property
    def lead_rest(self) -> str:
        """Return the strongest evidence as a sentence; nothing if there is none."""
        return write_sentence(self.evidence)

    @cached_property
    def models(self) -> list[TestedModelView]:
        """Return the results for each model."""
        return [_view_model(result) for result in self.result.get("models_tested", [])]

    @property
    def stages(self) -> list[tuple[str, str]]:
        """Return each stage with its end and its time, and its message or nothing."""
        stages = []
        for stage in self.test.stages:
            name = stage.name
            for model in self.test.request.models:
                name = name.replace(model, shorten_model_name(model))
            took = f", {format_duration(stage.seconds)}" if stage.seconds else ""
            stages.append((f"{name}: {stage.status}{took}", stage.message or ""))
        return stages

    @property
    def forecast(self) -> Forecast | None:
        """Return the forecast of a run with the best model; None without a measurement."""
        try:
            return Forecast.model_validate(self.summary.get("forecast"))
        except ValidationError:
            return None

    @property
    def cost_usd(self) -> float | None:
        """Return the cost of the test in US dollars; None without a known price."""
        return self.summary.get("cost_usd")

    @property
    def train_command(self) -> str:
        """Return the command that trains the tested model on the tested environment, with the same
        settings."""
        spec, is_free = self.test.request.spec, self.test.request.spec.profile == "embedded"
        # A paid profile requires the test in any case.
        flags = ["--require-validation", "--watch"] if is_free else ["--watch"]
        return LaunchCommand(
            environment=self._environment,
            profile=spec.profile,
            model=spec.model,
            settings=spec.settings,
            flags=flags,
        ).format_training()

    @property
    def commands(self) -> list[str]:
        """Return the commands that can follow: train, test again, and show the environment."""
        return [
            self.train_command,
            format_command("test", self._environment),
            format_command("env", "show", self._environment),
        ]

    @property
    def _environment(self) -> str:
        request = self.test.request
        return get_name_or_file(request.environment, request.environment_file)

    def describe_next_step(self, train: str, test: str) -> str:
        """Return the next step after an ended test, in words.

        Args:
            train: How the asking user interface starts the training.
            test: How it starts another test.
        """
        word = self.test.verdict or ""
        if not self.summary.get("environment_working"):
            word = "broken"
        return _NEXT_STEPS[word].format(test=test) if word in _NEXT_STEPS else train

    def list_examples(self, model: str) -> list[tuple[str, list[AnswerColumn]]]:
        """Return some prompts of the environment, each with the answers of a model."""
        if model not in self.test.request.models:
            return []
        try:
            samples = read_samples(self.store.get_samples_file(self.test, model))[:MAX_EXAMPLES]
        except (OSError, StorageError):
            return []
        examples = []
        for group in samples:
            rows = [
                {
                    "answer": str(text),
                    "score": score,
                    "advantage": None,
                    "outcome": "",
                    "reason": None,
                }
                for text, score in zip(group["responses"], group["scores"], strict=False)
            ]
            examples.append((str(group.get("prompt")), build_answers(rows, None)))
        return examples


def choose_test_mark(test: InferenceTest | None) -> Mark:
    """Return the mark of a test's verdict; `not tested` without a test."""
    if test is None:
        return make_mark("not tested")
    if not test.has_ended:
        return make_mark("testing")
    if test.status == "failed":
        return make_mark("failed")
    return make_mark(test.verdict or "answered")


def _view_model(result: Json) -> TestedModelView:
    """Return the results of one model as surfaces lay them out."""
    verdict = result.get("verdict") or {}
    error = str(result.get("error") or "")
    return TestedModelView(
        model=str(result.get("model")),
        name=shorten_model_name(str(result.get("model") or result.get("name"))),
        mark=make_mark(verdict.get("word") or "answered"),
        evidence=[str(text) for text in verdict.get("evidence", []) if text != error],
        error=error.split("\n")[0],
        reward_mean=verdict.get("reward_mean"),
        num_answers=int(result.get("total_completions") or 0),
        shares=_list_shares(result, verdict),
        summary=_summarize(result, verdict),
        answered_prompts=[_describe_answers(prompt) for prompt in result.get("prompts", [])],
    )


def _list_shares(result: Json, verdict: Json) -> list[Share]:
    """Return the shares that a test has measured of one model, that of right answers first."""
    shares = []
    if result.get("accuracy") is not None:
        interval = result.get("accuracy_interval") or {}
        items = f"n {interval['items']:.0f} items" if interval.get("items") else ""
        low, high = interval.get("low"), interval.get("high")
        shares.append(Share("right answers", result["accuracy"], low, high, items))
    intervals = verdict.get("intervals") or {}
    names = {
        "zero_signal_share": ("groups without a signal", f"n {verdict.get('groups')} groups"),
        "truncation_rate": ("truncated answers", f"n {result.get('total_completions')} answers"),
        "invalid_rate": ("rollouts without a score", ""),
    }
    for key, (name, items) in names.items():
        if verdict.get(key) is not None:
            low, high = intervals.get(key) or (None, None)
            shares.append(Share(name, verdict[key], low, high, items))
    return shares


def _summarize(result: Json, verdict: Json) -> str:
    """Return how many answers were right and how many groups have a signal, in words."""
    if result.get("accuracy") is None:
        return ""
    interval = result.get("accuracy_interval") or {}
    share = describe_point(HeldOutPoint(step=0, percent_correct=result["accuracy"], **interval))
    text = (
        f"score above 0: {result.get('correct_completions')} of {result.get('total_completions')} "
        f"answers in {result.get('steps_tested')} groups, {share}"
    )
    without_signal = verdict.get("zero_signal_share")
    if without_signal is not None:
        text += f"; {format_percent(without_signal)} of the groups without a signal"
    return text


def _describe_answers(prompt: Json) -> str:
    """Return a user's prompt with its scored answers on one line."""
    answers = "; ".join(
        f"{answer['text']!r} ({format_decimal(answer['score'], 'no score')})"
        for answer in prompt["responses"]
    )
    note = f" [{prompt['note']}]" if prompt.get("note") else ""
    return f"{prompt['prompt']!r} -> {answers}{note}"
