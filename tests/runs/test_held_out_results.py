"""What evaluations on held-out items have shown, on every surface that needs no server."""

import functools
import json
import os
import time
from typing import Any

import pytest

from lachesis.base.errors import StorageError
from lachesis.reporting.run_schemas import build_run_results, build_run_status
from lachesis.reporting.run_summary import summarize_run
from lachesis.reporting.run_view import RunView
from lachesis.runs.folder import RunDir
from lachesis.runs.held_out_results import (
    build_held_out_curve,
    compute_interval,
    describe_evaluation_faults,
    describe_point,
    find_accuracy,
    find_base_result,
    find_held_out_answers,
    find_newest_result,
    read_held_out_points,
    summarize_failures,
    to_point,
)
from lachesis.runs.metrics import MetricsFile
from lachesis.runs.record import AdditionalEnvironment
from lachesis.web.report_file import write_page
from tests.harness import home as records

SHARES = {0: 0.1, 10: 0.3, 20: 0.55, 30: 0.7}


def metrics_of(step, share, items=20):
    return {"eval/step": step, "eval/percent_correct": share, "eval/items": items}


@pytest.fixture
def folder(tmp_path):
    """A run of 30 steps whose results arrived three steps late, and one of which has failed."""
    made = RunDir(tmp_path, "0123abcd")
    made.evaluation.mkdir(parents=True)
    file = MetricsFile(made.metrics)
    for step in range(1, 31):
        late = {point + 3: metrics_of(point, share) for point, share in SHARES.items()}.get(
            step, {}
        )
        file.append(
            step,
            {
                "reward/mean": step / 40,
                "train/percent_correct": step / 50,
                "train/loss": 0.5,
                **late,
            },
        )
    file.add_evaluation(metrics_of(30, SHARES[30]))
    made.failed_evaluations.write_text(
        json.dumps({"step": 15, "reason": "evaluate() raised ValueError: <no items>"}) + "\n"
    )
    return made


make_record = functools.partial(records.make_record, total_steps=30, status="running")


def test_a_share_comes_with_its_items_and_its_interval():
    point = to_point(metrics_of(7, 0.75), 7)
    assert point is not None
    assert (point.items, point.low, point.high) == (20, 0.531299, 0.888138)
    assert describe_point(point) == "0.750 (20 items, 95 % interval 0.531 to 0.888)"
    assert describe_point(None) == "none"
    assert compute_interval(75.0, 20) == {}, "a percentage is no share"
    assert compute_interval(0.5, None) == compute_interval(0.5, 0) == {}
    alone = to_point({"eval/accuracy": 0.5}, 1)
    assert alone is not None
    assert describe_point(alone) == "0.500"
    assert find_accuracy({"eval/reward": 1.0}) is None


def test_the_curve_is_by_the_step_of_the_weights(folder):
    steps = MetricsFile(folder.metrics).read()
    assert {point.step: point.percent_correct for point in build_held_out_curve(steps)} == SHARES
    assert build_held_out_curve([{"step": 3, "eval/step": 1, "eval/reward": 2.0}]) == []
    other = [
        {
            "step": 3,
            "environments/words/eval/step": 2,
            "environments/words/eval/percent_correct": 0.25,
        }
    ]
    assert [point.step for point in build_held_out_curve(other, "words")] == [2]
    assert build_held_out_curve(other) == []


def test_a_late_result_moves_the_one_of_its_line(tmp_path):
    """Both stay, each with the step of its weights; without a line there is nothing to add it
    to.
    """
    file = MetricsFile(tmp_path / "metrics.jsonl")
    assert not file.add_evaluation(metrics_of(0, 0.5))
    for step in (1, 2, 3):
        file.append(
            step, {"reward/mean": 0.5, **(metrics_of(step - 1, step / 10) if step > 1 else {})}
        )
    assert file.add_evaluation(metrics_of(3, 0.9))
    lines = file.read()
    assert [(line["step"], line["eval/step"]) for line in lines] == [(1, 1), (2, 2), (3, 3)]
    assert {line["reward/mean"] for line in lines} == {0.5}


def test_the_result_of_step_0_stays(tmp_path, caplog):
    """A curve begins with it. Results are one more than lines, so that of step 1 is left out."""
    file = MetricsFile(tmp_path / "metrics.jsonl")
    for step in (1, 2, 3):
        file.append(step, {"reward/mean": 0.5, **metrics_of(step - 1, step / 10)})
    assert file.add_evaluation(metrics_of(3, 0.9))
    assert [(line["step"], line["eval/step"]) for line in file.read()] == [(1, 0), (2, 2), (3, 3)]
    assert "no line of the metrics is left for the evaluation" in caplog.text
    assert '"eval/step": 1' in caplog.text


def test_a_failed_evaluation_moves_no_result(tmp_path):
    file = MetricsFile(tmp_path / "metrics.jsonl")
    for step in (1, 2):
        file.append(step, {"reward/mean": 0.5, **metrics_of(step, 0.25)})
    for _ in range(2):
        assert file.add_evaluation({"eval/failed": 1})
    assert file.add_evaluation({**metrics_of(3, 0.5), "eval/failed": 1})
    failed = [(line["eval/step"], line.get("eval/failed")) for line in file.read()]
    assert failed == [(2, None), (3, 3)]


def test_lines_that_change_are_written_together(tmp_path, monkeypatch):
    """A reader drops what follows an earlier step, so half of them would cost the last step."""
    file = MetricsFile(tmp_path / "metrics.jsonl")
    for step in (1, 2, 3):
        late = metrics_of(step - 1, step / 10) if step > 1 else {}
        file.append(step, {"reward/mean": 0.5, **late})
    before = file.read()
    size = file.path.stat().st_size
    seen: list[list[dict[str, Any]]] = []
    replace = os.replace

    def look_and_replace(*paths):
        seen.append(file.read())
        replace(*paths)

    with monkeypatch.context() as patch:
        patch.setattr("lachesis.base.files.os.fsync", full)
        with pytest.raises(StorageError, match="No space left"):
            file.add_evaluation(metrics_of(3, 0.9))
    assert file.read() == before
    monkeypatch.setattr("lachesis.base.files.os.replace", look_and_replace)
    file.add_evaluation(metrics_of(3, 0.9))
    assert seen == [before]
    lines, _ = file.read_from(size)
    followed = [(line["step"], line["eval/step"]) for line in lines]
    assert followed == [(1, 1), (2, 2), (3, 3)], "who follows the file sees them"


def read_shares(record, steps):
    points = read_held_out_points(record, steps)
    return {name: point.percent_correct for name, point in points.items()}


def full(*_):
    raise OSError(28, "No space left on device")


def test_status_and_results_show_the_curve(folder):
    steps = MetricsFile(folder.metrics).read()
    status = build_run_status(RunView(make_record(), folder, steps)).to_payload()
    assert status["metrics"] == {
        "step": 30, "reward_mean": 0.75, "percent_correct": 0.6, "eval_percent_correct": 0.7,
        "loss": 0.5, "state": "running",
    }  # fmt: skip
    assert status["held_out_curve"][1] == {
        "step": 10,
        "percent_correct": 0.3,
        "items": 20,
        "low": 0.145477,
        "high": 0.518973,
    }
    assert status["evaluation"] == {
        "failed": 1,
        "last_step": 15,
        "last_reason": "evaluate() raised ValueError: <no items>",
    }
    point = find_newest_result(steps[-5:])
    assert point is not None
    assert (point.step, point.percent_correct) == (30, 0.7)


def test_the_results_before_and_after_training_are_those_of_its_ends(folder):
    """A running run has none after training yet."""
    words = {f"environments/words/{key}": value for key, value in metrics_of(30, 0.25).items()}
    MetricsFile(folder.metrics).add_evaluation(words)
    steps = MetricsFile(folder.metrics).read()
    of_words = AdditionalEnvironment(environment_file="w", fingerprint="f")
    record = make_record(additional_environments={"words": of_words})
    assert read_shares(record, steps) == {"before": SHARES[0]}
    ended = record.model_copy(update={"status": "completed"})
    results = build_run_results(RunView(ended, folder, steps)).to_payload()
    assert results["held_out"] == {"before": SHARES[0], "after": 0.7, "words after": 0.25}
    after = {"items": 20, "low": 0.481027, "high": 0.854523}
    assert results["held_out_intervals"]["after"] == after
    stopped = ended.model_copy(update={"status": "stopped"})
    assert read_shares(stopped, [*steps, {"step": 31}]) == {"before": SHARES[0]}


def test_the_base_model_has_one_result_wherever_training_begins(folder):
    """A fork begins with other weights than the base model's, which step 0 is about."""
    steps, record = MetricsFile(folder.metrics).read(), make_record()
    assert find_base_result(record, steps) == build_held_out_curve(steps)[0]
    fork = make_record(forked_from="89abcdef", starts_from_base=False)
    assert find_base_result(fork, steps) is None
    assert summarize_run(fork, folder).held_out_before is None
    base = {f"eval_base/{key.removeprefix('eval/')}": v for key, v in metrics_of(0, 0.05).items()}
    MetricsFile(folder.metrics).add_evaluation(base)
    steps = MetricsFile(folder.metrics).read()
    base_result = find_base_result(fork, steps)
    assert base_result is not None
    assert base_result.percent_correct == 0.05
    assert summarize_run(fork, folder).held_out_before == base_result
    assert read_shares(fork, steps)["before"] == 0.05
    assert build_held_out_curve(steps)[0].percent_correct == SHARES[0], "the fork's own start"
    assert summarize_run(record, folder).held_out_before == build_held_out_curve(steps)[0]


def test_recorded_answers_are_those_of_the_base_model_and_of_the_newest_weights(folder):
    assert find_held_out_answers(folder) == {}
    for name in ("step-0", "step-10", "step-9", "step-x", "words/step-30"):
        (folder.evaluation / name).mkdir(parents=True)
        (folder.evaluation / name / "samples.jsonl").touch()
    titles = {when: title for when, (title, _) in find_held_out_answers(folder).items()}
    assert titles == {"before": "before training", "after": "after step 10"}
    (folder.evaluation / "base").mkdir()
    (folder.evaluation / "base" / "samples.jsonl").touch()
    assert find_held_out_answers(folder)["before"][0] == "by the base model"


def test_what_a_run_took_includes_the_evaluations_after_the_last_step(folder):
    """The trainer writes them when it ends; the last line of the metrics is older."""
    file = MetricsFile(folder.metrics)
    file.append(
        31,
        {f"tokens/{kind}_total": 100 for kind in ("prefill", "sampled", "trained")}
        | {"cost/total": 1.0},
    )
    folder.spent.write_text(
        json.dumps({"prefill": 120, "sampled": 150, "trained": 100, "cost_usd": 1.5})
    )
    view = RunView(make_record(status="completed"), folder, file.read())
    actual = build_run_results(view).to_payload()["actual"]
    assert actual["tokens"] == {"prefill": 120, "sampled": 150, "trained": 100}
    assert actual["cost_usd"] == 1.5


def test_a_result_without_a_number_of_items_is_shown(tmp_path):
    run_dir = RunDir(tmp_path, "0123abcd")
    run_dir.path.mkdir()
    MetricsFile(run_dir.metrics).append(5, {"eval/step": 5, "eval/percent_correct": 0.625})
    steps = MetricsFile(run_dir.metrics).read()
    record = make_record(status="completed")
    view = RunView(record, run_dir, steps)
    write_page(view, tmp_path / "report.html")
    assert "<p>Evaluations" not in (tmp_path / "report.html").read_text()


def test_an_evaluation_that_blocks_training_is_told(folder):
    counts = {"written_at": time.time() + 60, "eval_blocked_s": 31.24}
    folder.get_counters_file("environment").write_text(json.dumps(counts))
    view = RunView(make_record(), folder, [])
    status = build_run_status(view).to_payload()
    assert status["evaluation"]["blocked_seconds"] == 31.2
    assert status["evaluation"]["failed"] == 1
    assert "was blocked for 31 s" in describe_evaluation_faults(view.evaluation_faults)
    folder.failed_evaluations.unlink()
    only_blocked = summarize_failures(folder, counts)
    assert only_blocked == {"blocked_seconds": 31.2}
    assert "failed" not in describe_evaluation_faults(only_blocked or {})
    assert summarize_failures(folder, {**counts, "eval_blocked_s": 4.9}) is None


def test_a_run_without_evaluations_has_none(tmp_path):
    view = RunView(make_record(), RunDir(tmp_path, "0123abcd"), [])
    status = build_run_status(view).to_payload()
    assert (status["held_out_curve"], "evaluation" in status) == ([], False)
    assert status["metrics"]["eval_percent_correct"] is None
    assert find_newest_result([{"step": 1}]) is None
