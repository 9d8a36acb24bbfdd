"""Lay out the environments and their tests, and serve them as pages and as CSV."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from lachesis.base.formatting import count_in_words
from lachesis.environment_catalog.scan import scan_environments
from lachesis.operations.inference_tests import InferenceTest, InferenceTestStore, open_tests
from lachesis.reporting.inference_test_view import InferenceTestView, choose_test_mark
from lachesis.reporting.run_cache import RunCache
from lachesis.reporting.run_view import list_forecast_ranges
from lachesis.reporting.verdict_marks import Mark
from lachesis.web.rendering import make_csv_response, make_page

MAX_HISTORY = 30
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
    """Hold the row of one environment."""

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
    """Hold the parts of the page of all environments."""

    lead: str
    lead_rest: str
    rows: list[EnvironmentRow]
    problems: list[tuple[str, str]]
    """Files that cannot be scanned, by name, and why."""


def build_environment_list(tests: InferenceTestStore) -> EnvironmentListPage:
    """Return the page of all environments, those that need a look first."""
    scan = scan_environments()
    by_name: dict[str, list[InferenceTest]] = {}
    for test in tests.all():
        by_name.setdefault(test.request.environment, []).append(test)
    descriptions = {found.name: found.description for found in scan.environments}
    names = sorted({*descriptions, *by_name})
    rows = [_make_row(tests, name, descriptions.get(name), by_name.get(name, [])) for name in names]
    # Those that need a look first, and those that nobody has tested last.
    rows.sort(key=lambda row: (row.mark.word not in ALARMING_VERDICTS, row.test is None))
    lead, lead_rest = _write_list_lead(rows)
    problems = [(path.rpartition("/")[2], why) for path, why in scan.problems.items()]
    return EnvironmentListPage(lead, lead_rest, rows, problems)


def _make_row(
    store: InferenceTestStore, name: str, description: str | None, tests: Sequence[InferenceTest]
) -> EnvironmentRow:
    """Return an environment with its newest test as a row of the list."""
    newest = InferenceTestView(tests[0], store) if tests else None
    return EnvironmentRow(
        name=name,
        description=description or "",
        mark=choose_test_mark(newest.test if newest else None),
        evidence=newest.evidence if newest else "",
        test=newest.test if newest else None,
        history=list_history(tests),
        is_missing=description is None,
    )


def list_history(tests: Sequence[InferenceTest]) -> list[NightMark]:
    """Return a mark for each of the newest tests, the oldest first.

    Args:
        tests: Tests of one environment, the newest first.
    """
    return [
        NightMark(test.test_id, choose_test_mark(test), test.created_at)
        for test in reversed(tests[:MAX_HISTORY])
    ]


def _write_list_lead(rows: Sequence[EnvironmentRow]) -> tuple[str, str]:
    """Return how many environments need a look, and how many were never tested."""
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


def _list_tests_of(tests: InferenceTestStore, environment: str) -> list[InferenceTest]:
    """Return the tests of one environment, the newest first."""
    return [test for test in tests.all() if test.request.environment == environment]


def _get_tests(request: Request) -> InferenceTestStore:
    cache: RunCache = request.app.state.cache
    return open_tests(cache.store)


def _get_view(request: Request) -> InferenceTestView:
    """Return the test that the address names.

    Raises:
        UnknownTestError: There is no such test.
        StorageError: Its record is damaged.
    """
    tests = _get_tests(request)
    return InferenceTestView(tests.load(request.path_params["test_id"]), tests)


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
    view, tests = _get_view(request), _get_tests(request)
    return make_page(
        request,
        "environment_test.html.j2",
        section="environments",
        view=view,
        history=list_history(_list_tests_of(tests, view.test.request.environment)),
        forecast=list_forecast_ranges(view.forecast) if view.forecast else [],
    )


def download_shares(request: Request) -> Response:
    """Return the shares that a test has measured as CSV, for each tested model."""
    view = _get_view(request)
    rows = [
        {"model": model.name, "verdict": model.mark.word} | asdict(share)
        for model in view.models
        for share in model.shares
    ]
    return make_csv_response(f"test-{view.test.test_id}.csv", rows)


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
