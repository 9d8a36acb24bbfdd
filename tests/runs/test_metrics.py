"""The metrics file, of which the last steps are read without the rest."""

import pytest

from lachesis.runs.metrics import MetricsFile, MetricsReader


@pytest.mark.parametrize("num_values", [1, 300])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_the_last_steps_are_read_however_long_their_lines_are(tmp_path, num_values, count):
    """A line of four environments with an evaluation has more than 4,000 bytes."""
    file = MetricsFile(tmp_path / "metrics.jsonl")
    assert file.tail(count) == []
    for step in range(1, 5):
        file.append(
            step, {f"environments/another_one/eval/value_{i}": 1.0 for i in range(num_values)}
        )
    steps = [line["step"] for line in file.tail(count)]
    assert steps[-min(count, 4) :] == list(range(1, 5))[-count:]


def test_the_first_and_the_last_line_with_a_metric_are_found_without_the_others(tmp_path):
    file = MetricsFile(tmp_path / "metrics.jsonl")
    assert file.find_first("eval/step") is None
    file.path.touch()
    assert file.find_last("eval/step") is None
    for step in range(1, 200):
        file.append(step, {"eval/step": step} if step in (7, 8, 150) else {"reward/mean": 0.5})
    first, last = file.find_first("eval/step"), file.find_last("eval/step")
    assert first is not None
    assert last is not None
    assert (first["step"], last["step"]) == (7, 150)
    assert file.find_last("eval/items") is None


def test_a_growing_file_is_read_as_a_whole_one(tmp_path):
    """Also if a resume makes steps again, or the file is written anew or gone."""
    file = MetricsFile(tmp_path / "metrics.jsonl")
    reader = MetricsReader(file.path)
    assert reader.read() == []
    for step in (1, 2, 3, 4, 3, 4, 5):
        file.append(step, {"reward/mean": step / 10})
        assert reader.read() == file.read()
    earlier = reader.read()
    with file.path.open("a") as cut:
        cut.write('{"step": 6, "rew')
    assert reader.read() == earlier
    file.append(6, {"reward/mean": 0.6})
    assert [step["step"] for step in reader.read()] == [1, 2, 3, 4, 5, 6]
    assert [step["step"] for step in earlier] == [1, 2, 3, 4, 5]
    file.path.write_text('{"step": 1}\n')
    assert reader.read() == [{"step": 1}]
    file.path.unlink()
    assert reader.read() == []
