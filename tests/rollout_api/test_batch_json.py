"""A batch is read from JSON in small steps, and comes out as `json.loads` gives it."""

import json

import numpy as np
import pytest
from hypothesis import strategies as st

from lachesis.rollout_api import batch_json
from lachesis.rollout_api.batch_json import read_batch_json
from tests.harness.properties import examples

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=30,
)
NUMBERS = st.lists(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=5), max_size=3)


def as_lists(value):
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, dict):
        return {key: as_lists(item) for key, item in value.items()}
    return [as_lists(item) for item in value] if isinstance(value, list) else value


@examples(VALUES, st.sampled_from([None, 1, "\t"]), st.booleans())
def test_any_value_is_read_as_json_reads_it(value, indent, ascii_alone):
    text = json.dumps(value, indent=indent, ensure_ascii=ascii_alone)
    content = f" \n{text}\r\n ".encode(errors="surrogatepass")
    try:
        content.decode()
    except UnicodeDecodeError:
        return  # half of a surrogate pair is not valid UTF-8, and the API sends none
    assert as_lists(read_batch_json(content)) == json.loads(text)


@examples(
    st.lists(
        st.fixed_dictionaries(
            {"tokens": NUMBERS, "inference_logprobs": NUMBERS, "messages": VALUES}
        ),
        max_size=3,
    )
)
def test_a_batch_has_arrays_and_loses_no_number(groups):
    batch = read_batch_json(json.dumps({"batch": groups}).encode())["batch"]
    for group, original in zip(batch, groups, strict=True):
        for row, numbers in zip(group["tokens"], original["tokens"], strict=True):
            assert (row.dtype, row.tolist()) == (np.dtype(np.int64), numbers)
        for row, numbers in zip(
            group["inference_logprobs"], original["inference_logprobs"], strict=True
        ):
            assert (row.dtype, row.tolist()) == (
                np.dtype(np.float64),
                [float(number) for number in numbers],
            )
        assert as_lists(group["messages"]) == original["messages"]


@pytest.mark.parametrize(
    "row",
    [[1, "x"], [2**70], [[1], [2, 3]], [[1], [2]], [1.5], [True, None]],
    ids=lambda row: json.dumps(row),
)
def test_what_does_not_fit_an_array_stays_a_list(row):
    assert read_batch_json(json.dumps({"batch": [{"tokens": [row]}]}).encode())["batch"][0][
        "tokens"
    ] == [row]


@examples(st.data(), VALUES)
def test_text_that_is_cut_off_is_refused(data, value):
    text = json.dumps({"batch": [{"tokens": [[1, 2]], "more": value}]}).encode()
    cut = data.draw(st.integers(0, len(text) - 1))
    with pytest.raises(
        ValueError, match=r"JSON|character|delimiter|string|escape|decode|value|property"
    ):
        read_batch_json(text[:cut])
    with pytest.raises(ValueError, match=r"JSON|character|value"):
        read_batch_json(text + b"]")


def test_no_call_into_c_reads_more_than_one_rollout(monkeypatch):
    """Each such call holds the interpreter's lock; the inference server answers between them."""
    longest, scan = 0, batch_json.decode_value

    def measured(text, at):
        nonlocal longest
        value, end = scan(text, at)
        longest = max(longest, end - at)
        return value, end

    monkeypatch.setattr(batch_json, "decode_value", measured)
    rows = [[1.25] * 1000 for _ in range(16)]
    group = {
        "tokens": [[12345] * 1000] * 16,
        "masks": [[12345] * 1000] * 16,
        "inference_logprobs": rows,
        "scores": [1.0] * 16,
    }
    read_batch_json(json.dumps({"batch": [group] * 4}).encode())
    assert longest == len(json.dumps([12345] * 1000))
