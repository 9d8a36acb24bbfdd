"""Lay out the environments and their tests, and serve them as pages and as CSV."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from lachesis.base.errors import StorageError, shorten
from lachesis.base.formatting import count_in_words, format_duration
from lachesis.base.json_text import Json
from lachesis.environment_catalog.scan import scan_environments
from lachesis.inference_tests.results import read_samples
from lachesis.inference_tests.store import InferenceTest, InferenceTestStore, shorten_model_name
from lachesis.reporting.rollouts import AnswerColumn, build_answers
from lachesis.reporting.run_cache import RunCache
from lachesis.reporting.verdict_marks import Mark, make_mark
from lachesis.web.rendering import make_csv_response, make_page

MAX_HISTORY, MAX_EXAMPLES = 30, 6
# Verdicts of a test that call for a look at the environment.
ALARMING_VERDICTS = ("broken", "failed", "too hard")


@dataclass(frozen=True)
class NightMark:
    """Hold one earlier test as a mark."""

    test_id: str
    mark: Mark
    created_at: str


@dataclass(frozen=True)
class EnvironmentRow:
    """Hold what the table shows of one environment."""

    name: str
    description: str
    mark: Mark
    evidence: str
    test: InferenceTest | None
    """Its newest test."""
    history: list[NightMark]
    """Its tests, the oldest first."""
    is_missing: bool
    """Whether only its tests are left."""


@dataclass(frozen=True)
class EnvironmentListPage:
    """Hold what the page of all environments shows."""

    lead: str
    lead_rest: str
    rows: list[EnvironmentRow]
    problems: list[tuple[str, str]]
    """Files that cannot be scanned, by name, and why."""


@dataclass(frozen=True)
class ShareRow:
    """Hold one share that a test has measured, with its interval."""

    name: str
    share: float
    low: float | None
    high: float | None
    items: str


@dataclass(frozen=True)
class ModelResult:
    """Hold what a test says of one model."""

    __test__ = False  # pytest must not collect this class.

    name: str
    mark: Mark
    evidence: list[str]
    error: str
    reward_mean: float | None
    num_completions: int
    shares: list[ShareRow]
    examples: list[tuple[str, list[AnswerColumn]]]
    """Prompts with the answers to each."""


@dataclass(frozen=True)
class EnvironmentTestPage:
    """Hold what the page of one test shows."""

    test: InferenceTest
    mark: Mark
    lead: str
    lead_rest: str
    models: list[ModelResult]
    history: list[NightMark]
    stages: list[tuple[str, str]]
    """What was done and how it ended, and a message where there is one."""
    forecast: list[tuple[str, str]]
    """What a run on this environment takes, by name."""
    commands: list[str]


def build_environment_list(tests: InferenceTestStore) -> EnvironmentListPage:
    """Return the page of all environments, those that need a look first."""
    scan = scan_environments()
    by_name: dict[str, list[InferenceTest]] = {}
    for test in tests.all():
        by_name.setdefault(test.request.environment, []).append(test)
    descriptions = {found.name: found.description for found in scan.environments}
    names = sorted({*descriptions, *by_name})
    rows = [_make_row(name, descriptions.get(name), by_name.get(name, [])) for name in names]
    # Those that need a look first, and those that nobody has tested last.
    rows.sort(key=lambda row: (row.mark.word not in ALARMING_VERDICTS, row.test is None))
    lead, lead_rest = _write_list_lead(rows)
    problems = [(path.rpartition("/")[2], why) for path, why in scan.problems.items()]
    return EnvironmentListPage(lead, lead_rest, rows, problems)


def _make_row(name: str, description: str | None, tests: Sequence[InferenceTest]) -> EnvironmentRow:
    newest = tests[0] if tests else None
    return EnvironmentRow(
        name=name,
        description=description or "",
        mark=_choose_mark(newest),
        evidence=_find_evidence(newest),
        test=newest,
        history=list_history(tests),
        is_missing=description is None,
    )


def list_history(tests: Sequence[InferenceTest]) -> list[NightMark]:
    """Return a mark for each of the newest tests, the oldest first.

    Args:
        tests: Tests of one environment, the newest first.
    """
    return [
        NightMark(test.test_id, _choose_mark(test), test.created_at)
        for test in reversed(tests[:MAX_HISTORY])
    ]


def _choose_mark(test: InferenceTest | None) -> Mark:
    if test is None:
        return make_mark("not tested")
    if not test.has_ended:
        return make_mark("testing")
    if test.status == "failed":
        return make_mark("failed")
    return make_mark(test.verdict or "answered")


def _find_evidence(test: InferenceTest | None) -> str:
    if test is None:
        return ""
    if test.error:
        return shorten(test.error.splitlines()[0], 160)
    for model in (test.result or {}).get("models_tested", []):
        evidence = (model.get("verdict") or {}).get("evidence") or []
        if evidence:
            return str(evidence[0])
    return ""


def _write_list_lead(rows: Sequence[EnvironmentRow]) -> tuple[str, str]:
    num_alarming = sum(row.mark.word in ALARMING_VERDICTS for row in rows)
    num_untested = sum(row.test is None for row in rows)
    total = f"{len(rows):,} environments"
    if num_alarming:
        verb = "needs" if num_alarming == 1 else "need"
        lead = f"{count_in_words(num_alarming, is_first=True)} of {total} {verb} a look."
    else:
        lead = f"{total}, none needs a look."
    if not num_untested:
        return lead, ""
    verb = "was" if num_untested == 1 else "were"
    return lead, f"{count_in_words(num_untested, is_first=True)} {verb} never tested."


def build_test_page(tests: InferenceTestStore, test_id: str) -> EnvironmentTestPage:
    """Return the page of one test.

    Raises:
        UnknownTestError: There is no such test.
        StorageError: Its record is damaged.
    """
    test = tests.load(test_id)
    same = [other for other in tests.all() if other.request.environment == test.request.environment]
    models = [
        _make_model(tests, test, result) for result in (test.result or {}).get("models_tested", [])
    ]
    name = test.request.environment
    lead, lead_rest = _write_test_lead(test)
    return EnvironmentTestPage(
        test=test,
        mark=_choose_mark(test),
        lead=lead,
        lead_rest=lead_rest,
        models=models,
        history=list_history(same),
        stages=_list_stages(test),
        forecast=_describe_forecast(((test.result or {}).get("summary") or {}).get("forecast")),
        commands=[f"lachesis train {name}", f"lachesis test {name}", f"lachesis env show {name}"],
    )


def _list_stages(test: InferenceTest) -> list[tuple[str, str]]:
    """Return the stages, with a model's name in place of its folder on this machine."""
    stages = []
    for stage in test.stages:
        name = stage.name
        for model in test.request.models:
            name = name.replace(model, shorten_model_name(model))
        took = f", {format_duration(stage.seconds)}" if stage.seconds else ""
        stages.append((f"{name}: {stage.status}{took}", stage.message or ""))
    return stages


def _describe_forecast(forecast: Json | None) -> list[tuple[str, str]]:
    """Return the ranges of a forecast that are known."""
    rows = []
    for key, name in (("tokens", "Tokens of a run"), ("hours", "Training"), ("cost_usd", "Cost")):
        if not (known := (forecast or {}).get(key)):
            continue
        low, high = known["low"], known["high"]
        if key == "hours":
            text = f"{format_duration(low * 3600)} to {format_duration(high * 3600)}"
        else:
            unit = "$" if key == "cost_usd" else ""
            text = f"{unit}{low:,.0f} to {unit}{high:,.0f}"
        rows.append((name, text))
    return rows


def _write_test_lead(test: InferenceTest) -> tuple[str, str]:
    evidence = _find_evidence(test)
    rest = f"{evidence[:1].upper()}{evidence[1:]}." if evidence else ""
    leads = {
        "learnable": "A model can learn from it.",
        "too easy": "It is too easy for these models.",
        "too hard": "It is too hard for these models.",
        "broken": "It is broken.",
    }
    if not test.has_ended:
        return "It is being tested.", ""
    if test.status == "failed":
        return "It could not be tested.", rest
    return leads.get(test.verdict or "", "The models have answered."), rest


def _make_model(tests: InferenceTestStore, test: InferenceTest, result: Json) -> ModelResult:
    verdict = result.get("verdict") or {}
    return ModelResult(
        name=shorten_model_name(str(result.get("model") or result.get("name"))),
        mark=make_mark(verdict.get("word") or "answered"),
        evidence=[str(sentence) for sentence in verdict.get("evidence", [])],
        error=str(result.get("error") or ""),
        reward_mean=verdict.get("reward_mean"),
        num_completions=int(result.get("total_completions") or 0),
        shares=_list_shares(result, verdict),
        examples=_read_examples(tests, test, str(result.get("model"))),
    )


def _list_shares(result: Json, verdict: Json) -> list[ShareRow]:
    """Return the shares that a test has measured, each with its interval."""
    intervals, groups = verdict.get("intervals") or {}, verdict.get("groups")
    rows = []
    interval = result.get("accuracy_interval") or {}
    if result.get("accuracy") is not None:
        items = interval.get("items")
        rows.append(
            ShareRow(
                "right answers",
                result["accuracy"],
                interval.get("low"),
                interval.get("high"),
                f"n {items:.0f} items" if items else "",
            )
        )
    names = {
        "zero_signal_share": ("groups without a signal", f"n {groups} groups"),
        "truncation_rate": ("truncated answers", f"n {result.get('total_completions')} answers"),
        "invalid_rate": ("rollouts without a score", ""),
    }
    for key, (name, items) in names.items():
        if verdict.get(key) is not None:
            low, high = intervals.get(key) or (None, None)
            rows.append(ShareRow(name, verdict[key], low, high, items))
    return rows


def _read_examples(
    tests: InferenceTestStore, test: InferenceTest, model: str
) -> list[tuple[str, list[AnswerColumn]]]:
    """Return some prompts with their answers and scores."""
    if model not in test.request.models:
        return []
    try:
        samples = read_samples(tests.get_samples_file(test, model))[:MAX_EXAMPLES]
    except (OSError, StorageError):
        return []
    examples = []
    for group in samples:
        rows = [
            {"answer": str(text), "score": score, "advantage": None, "outcome": "", "reason": None}
            for text, score in zip(group["responses"], group["scores"], strict=False)
        ]
        examples.append((str(group.get("prompt")), build_answers(rows, None)))
    return examples


def _get_tests(request: Request) -> InferenceTestStore:
    cache: RunCache = request.app.state.cache
    return InferenceTestStore(cache.store.home)


def show_environments(request: Request) -> Response:
    """Answer with all environments and the verdicts of their tests."""
    page = build_environment_list(_get_tests(request))
    return make_page(request, "environments.html.j2", section="environments", page=page)


def download_environments(request: Request) -> Response:
    """Answer with all environments as CSV."""
    rows = [
        {
            "environment": row.name,
            "verdict": row.mark.word,
            "evidence": row.evidence,
            "tested_at": row.test.created_at if row.test else None,
            "test_id": row.test.test_id if row.test else None,
        }
        for row in build_environment_list(_get_tests(request)).rows
    ]
    return make_csv_response("environments.csv", rows)


def show_test(request: Request) -> Response:
    """Answer with one test of an environment."""
    page = build_test_page(_get_tests(request), request.path_params["test_id"])
    return make_page(request, "environment_test.html.j2", section="environments", page=page)


def download_shares(request: Request) -> Response:
    """Answer with the shares that one test has measured as CSV, for all of its models."""
    page = build_test_page(_get_tests(request), request.path_params["test_id"])
    rows = [
        {"model": model.name, "verdict": model.mark.word} | asdict(share)
        for model in page.models
        for share in model.shares
    ]
    return make_csv_response(f"test-{page.test.test_id}.csv", rows)


def download_tests(request: Request) -> Response:
    """Answer with all tests as CSV, the newest first."""
    rows = [
        {
            "test_id": test.test_id,
            "environment": test.request.environment,
            "created_at": test.created_at,
            "status": test.status,
            "verdict": test.verdict,
            "models": " ".join(test.request.models),
            "error": test.error,
        }
        for test in _get_tests(request).all()
    ]
    return make_csv_response("tests.csv", rows)


ENVIRONMENT_ROUTES = [
    Route("/environments", show_environments),
    Route("/environments.csv", download_environments),
    Route("/tests.csv", download_tests),
    Route("/tests/{test_id}.csv", download_shares),
    Route("/tests/{test_id}", show_test),
]
