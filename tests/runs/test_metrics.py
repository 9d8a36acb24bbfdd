"""W&B beside the metrics file."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from lachesis.runs import metrics
from lachesis.runs.metrics import MetricsFile, WandbSink
from lachesis.supervision.ports import reserve_free_ports


def test_wandb_that_is_away_is_kept_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real client against a port where nobody listens; no line is lost, and what to do is
    said.
    """
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{reserve_free_ports(1)[0]}")
    monkeypatch.setattr(metrics, "INIT_TIMEOUT_S", 2.0)
    started = time.monotonic()
    sink = WandbSink(tmp_path, project="p", group=None, name="n", config={"a": 1})
    for step in range(1, 4):
        sink.log(step, {"reward/mean": 0.25})
    assert time.monotonic() - started < 1, "training does not wait"
    sink.close(50)
    assert sink.error is not None
    assert "wandb sync" in sink.error
    assert "k" * 40 not in sink.error
    (kept,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    until = time.monotonic() + 20
    # W&B's own process writes it a moment after the end
    while b"reward/mean" not in kept.read_bytes():
        assert time.monotonic() < until
        time.sleep(0.1)


def test_nothing_is_queued_for_a_wandb_that_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run of many steps would keep all their metrics in memory."""
    monkeypatch.setenv("WANDB_MODE", "no such mode")
    sink = WandbSink(tmp_path, project="p", group=None, name="n", config={})
    sink.log(1, {"reward/mean": 0.5})
    sink._thread.join(60)
    assert not sink._thread.is_alive()
    assert sink.error is not None
    assert "W&B logging stopped" in sink.error
    for step in range(2, 1000):
        sink.log(step, {"reward/mean": 0.5})
    assert sink._queue == []
    sink.close()


@pytest.mark.parametrize("num_values", [1, 300])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_the_last_steps_are_read_however_long_their_lines_are(
    tmp_path: Path, num_values: int, count: int
) -> None:
    """A line of four environments with an evaluation has more than 4,000 bytes."""
    file = MetricsFile(tmp_path / "metrics.jsonl")
    assert file.tail(count) == []
    for step in range(1, 5):
        file.append(
            step, {f"environments/another_one/eval/value_{i}": 1.0 for i in range(num_values)}
        )
    steps = [line["step"] for line in file.tail(count)]
    assert steps[-min(count, 4) :] == list(range(1, 5))[-count:]
