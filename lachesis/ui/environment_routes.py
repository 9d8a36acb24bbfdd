"""Serve the pages of environments and of their tests."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from lachesis.pages.environment_pages import build_environment_list, build_test_page
from lachesis.pages.run_cache import RunCache
from lachesis.ui.csv_files import make_csv_response
from lachesis.ui.page_responses import make_page
from lachesis.validation.inference_tests import InferenceTestStore


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


ENVIRONMENT_ROUTES = [
    Route("/environments", show_environments),
    Route("/environments.csv", download_environments),
    Route("/tests/{test_id}", show_test),
]
