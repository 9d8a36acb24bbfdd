"""Which addresses the server's automations can call, and what an evaluation may hold."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lachesis.base.errors import ConfigError, RunStateError
from lachesis.prefect_client.notifications import set_notifications
from lachesis.runs.held_out_results import read_evaluation


@pytest.mark.parametrize(
    "url",
    [
        "",
        "ftp://a/",
        "http://[::1",
        "http://a b/",
        "http://localhost:99999/x",
        "http://a/\n",
        "http://a/{{ flow_run }}",
    ],
)
def test_an_address_that_cannot_work_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="is not a web address; allowed"):
        set_notifications(url)


def test_a_metric_that_is_no_number_is_left_out(tmp_path: Path) -> None:
    """In a run's record it could not be read again."""
    (tmp_path / "metrics.json").write_text(
        json.dumps({"results": {"all": {"eval/a": float("nan"), "eval/b": 0.5}}})
    )
    assert read_evaluation(tmp_path) == {"eval/b": 0.5}


@pytest.mark.parametrize(
    "content", ["[]", "null", '{"results": []}', '{"results": {"all": [1, 2]}}', '{"results": 1}']
)
def test_an_evaluation_of_another_form_is_reported_as_missing(tmp_path: Path, content: str) -> None:
    (tmp_path / "metrics.json").write_text(content)
    with pytest.raises(RunStateError, match="has no evaluation"):
        read_evaluation(tmp_path)
