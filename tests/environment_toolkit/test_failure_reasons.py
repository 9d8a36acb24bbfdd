"""Failures are counted by the type of the exception and the line of the environment's code."""

import concurrent.futures
import importlib
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lachesis.environment_toolkit.failure_reasons import (
    MAX_REASON_LENGTH,
    OTHERS,
    count_reason,
    describe_exception,
    get_failure_kind,
    merge_counts,
)

TYPES = [ValueError, KeyError, ZeroDivisionError, RuntimeError]
FILE = "/tmp/an environment.py"
SOURCE = "def fail(error, line):\n" + "".join(
    f"    if line == {n}:\n        raise error\n" for n in range(5)
)
CODE: dict[str, Any] = {}
exec(compile(SOURCE, FILE, "exec"), CODE)
failures = st.tuples(st.sampled_from(TYPES), st.integers(0, 4), st.text(max_size=400))


def caught(function, *values):
    with pytest.raises(BaseException) as info:  # noqa: PT011
        function(*values)
    return info.value


def described(kind, line, message):
    return describe_exception(caught(CODE["fail"], kind(message), line), FILE)


@given(st.lists(failures, max_size=40))
def test_one_entry_for_each_type_and_line(found):
    """For any messages: the entries are the kinds, their counts those of the failures, their texts
    the first of each kind.
    """
    counts: dict[str, int] = {}
    first: dict[tuple[str, int], str] = {}
    for failure in found:
        text = described(*failure)
        first.setdefault((failure[0].__name__, failure[1]), text)
        count_reason(counts, text, max_kinds=100)
    expected = Counter((kind.__name__, line) for kind, line, _ in found)
    assert counts == {first[key]: count for key, count in expected.items()}
    for (kind, line), text in first.items():
        assert text.startswith(f"{kind} at an environment.py:{2 * line + 3}")
        assert len(text) <= MAX_REASON_LENGTH


@given(st.lists(st.text(max_size=30), max_size=60), st.integers(1, 6))
def test_no_count_is_lost_and_the_number_of_entries_is_bounded(texts, max_kinds):
    counts: dict[str, int] = {}
    for text in texts:
        count_reason(counts, text, max_kinds=max_kinds)
    assert sum(counts.values()) == len(texts)
    assert len(counts) <= max_kinds + 1
    assert len({get_failure_kind(text) for text in counts}) == len(counts)


@given(st.lists(failures, max_size=20), st.lists(failures, max_size=20))
def test_two_processes_count_as_one(here, there):
    counts: list[dict[str, int]] = [{}, {}, {}]
    for target, found in zip(counts, (here, there, [*here, *there]), strict=True):
        for failure in found:
            count_reason(target, described(*failure), max_kinds=100)
    total: dict[str, int] = {}
    merge_counts(total, counts[0])
    merge_counts(total, counts[1])
    assert total == counts[2]


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("the judge took 3 s", "the judge took 41.5 s", True),
        ("no file /tmp/a/b.txt", "no file /var/c.json", True),
        ("request req_8f3a1 failed", "request req_99 failed", True),
        ("the answer 'a' is odd", 'the answer "b c" is odd', True),
        ("the judge is away", "the judge is asleep", False),
        ("ValueError at a.py:1: x", "ValueError at a.py:2: x", False),
        ("ValueError at a.py:1: x", "ValueError at b.py:1: x", False),
        (
            "the verifier raised ValueError at a.py:1: x",
            "the verifier raised ValueError at a.py:1",
            True,
        ),
        (
            "the verifier raised ValueError at a.py:1: x",
            "play() raised ValueError at a.py:1: x",
            False,
        ),
    ],
)
def test_reasons_in_words_differ_by_more_than_numbers_quotes_and_paths(one, other, same):
    assert (get_failure_kind(one) == get_failure_kind(other)) is same


def test_the_innermost_line_of_the_environments_own_file_is_named(tmp_path, monkeypatch):
    """Not that of a library, nor that of a module beside it; without a line of its own, that of the
    module.
    """
    beside = tmp_path / "beside_scores.py"
    beside.write_text("import json\ndef parse(text):\n    return json.loads(text)\n")
    file = tmp_path / "own_scores.py"
    file.write_text(
        "import beside_scores\ndef score(text):\n    return beside_scores.parse(text)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    own, other = (importlib.import_module(name) for name in ("own_scores", "beside_scores"))
    for name in ("own_scores", "beside_scores"):
        monkeypatch.delitem(sys.modules, name)
    described = describe_exception(caught(own.score, "x"), str(file))
    assert described.startswith("JSONDecodeError at own_scores.py:3: Expecting value")
    described = describe_exception(caught(other.parse, "x"), str(file))
    assert described.startswith("JSONDecodeError at beside_scores.py:3")


def test_strange_exceptions_are_described():
    class Mute(Exception):
        def __str__(self) -> str:
            raise KeyError("no words")

    assert describe_exception(Mute()) == "Mute: the message of the exception raised KeyError"
    assert describe_exception(ValueError()) == "ValueError"
    assert (
        describe_exception(ExceptionGroup("two", [ValueError("a"), KeyError("b")]))
        == "ValueError: a"
    )
    attempt: concurrent.futures.Future[None] = concurrent.futures.Future()
    attempt.set_exception(TimeoutError("the judge"))
    retry = RuntimeError("gave up")
    retry.last_attempt = attempt  # type: ignore[attr-defined]
    assert describe_exception(retry) == "TimeoutError: the judge"
    with_library_only = caught(Path("/no/such/file").read_text)
    assert describe_exception(with_library_only, "/x.py").startswith(
        "FileNotFoundError at test_failure_reasons.py:"
    )
    counts = {OTHERS: 2}
    count_reason(counts, "a", max_kinds=1)
    count_reason(counts, "b", max_kinds=1)
    assert counts == {OTHERS: 3, "a": 1}
