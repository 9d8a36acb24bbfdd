"""A record is never cut, whatever character its text holds."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lachesis.base.json_text import parse_json_lines, read_json_lines, split_lines
from lachesis.inference_tests.results import collect_inference_counts, measure_groups
from lachesis.runs.metrics import MetricsFile

SEPARATORS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"
"""Everything at which `str.splitlines` ends a line."""
texts = st.text(st.one_of(st.sampled_from(SEPARATORS), st.characters(exclude_categories=("Cs",))))
records = st.lists(
    st.dictionaries(texts, st.one_of(texts, st.integers(), st.none(), st.lists(texts)), max_size=4),
    max_size=6,
)


@given(records, st.booleans(), st.sampled_from(["\n", "\r\n"]))
def test_what_was_written_is_read(written, ascii_only, end):
    content = "".join(json.dumps(record, ensure_ascii=ascii_only) + end for record in written)
    assert parse_json_lines(content.encode()) == written


@given(records, texts)
def test_a_cut_line_costs_no_other_one(written, text):
    content = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in written).encode()
    cut = json.dumps({"text": text}, ensure_ascii=False).encode()[:-1]
    assert parse_json_lines(content + cut) == written
    assert parse_json_lines(content + cut + b"\n" + content) == written * 2


@given(st.lists(st.text(st.characters(exclude_characters="\n\r", exclude_categories=("Cs",)))))
def test_only_a_line_feed_ends_a_line(lines):
    assert split_lines("\r\n".join(lines)) == (lines or [""])
    assert split_lines("\n".join(lines)) == (lines or [""])


def test_an_absent_file_has_no_lines(tmp_path):
    assert read_json_lines(tmp_path / "absent.jsonl") == []


@pytest.mark.parametrize("separator", SEPARATORS, ids=lambda one: f"U+{ord(one):04X}")
def test_scores_stay_with_their_own_group(tmp_path, separator):
    """A first group that got lost gave its measures to the second one."""
    output = tmp_path / "test.jsonl"
    groups = [{"scores": [0.0, 0.0], "text": f"a{separator}b"}, {"scores": [0.0, 1.0], "text": "c"}]
    output.write_text(
        "".join(json.dumps(group, ensure_ascii=False) + "\n" for group in groups), encoding="utf-8"
    )
    one = {
        "rollouts": 2,
        "requests": 1,
        "completions": 2,
        "prompt_tokens": 3,
        "sampled_tokens": 4,
        "seconds": 1.0,
    }
    assert collect_inference_counts(output, None).scores_P == [[0.0, 0.0], [0.0, 1.0]]
    assert [group.has_signal for group in measure_groups(output, {"per_group": [one, one]})] == [
        False,
        True,
    ]


def test_a_metric_with_such_a_name_is_read(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1, "reward/parts/a\u2028b": 0.5}\n{"step": 2}\n', encoding="utf-8")
    assert [step["step"] for step in MetricsFile(file).read()] == [1, 2]
