"""Serve the pages of environments and of their tests."""

from __future__ import annotations

from dataclasses import asdict

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from lachesis.inference_tests.store import InferenceTestStore
from lachesis.reporting.run_cache import RunCache
from lachesis.web.csv_files import make_csv_response
from lachesis.web.environment_pages import build_environment_list, build_test_page
from lachesis.web.page_responses import make_page


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
