"""Lines of a terminal are broken between words, and never inside a path or a command."""

import io

import pytest
from rich.console import Console, Group
from rich.text import Text

from lachesis.cli.terminal import (
    draw_sparkline,
    make_lines,
    make_pairs_table,
    print_sentence,
    wrap_between_words,
)

PATH = "/home/somebody/with/a/rather/long/name/runs/0123abcd/engine/weights/step-000300"


def show(view, width=40):
    console = Console(file=io.StringIO(), width=width, highlight=False)
    console.print(view, crop=False)
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined, no-any-return]


def test_values_are_wrapped_under_their_beginning():
    rows = [("run", "0123abcd"), ("what it is", "a few words that need more than one line here")]
    assert show(make_pairs_table([*rows, ("empty", None)])) == [
        "run         0123abcd",
        "what it is  a few words that need more",
        "            than one line here",
    ]


@pytest.mark.parametrize("text", [PATH, f"`lachesis train {PATH} --set a=1`", f"(`cd {PATH}`)"])
def test_what_is_copied_is_not_broken(text):
    lines = show(make_pairs_table([("a", f"before it {text} and after")]))
    assert [line.strip() for line in lines] == ["a  before it", text, "and after"]


def test_spaces_and_styles_are_kept():
    text = Text("one  two").append(" three", style="red")
    (first, second) = wrap_between_words(text, 9)
    assert (first.plain, second.plain) == ("one  two", "three")
    assert [span.style for span in second.spans] == ["red"]
    assert [line.plain for line in wrap_between_words(Text("a\n\nb"), 9)] == ["a", "", "b"]


def test_the_last_column_ends_with_an_ellipsis():
    rows = [["name", "1", "a description\nof several words that is long"], ["n", "22", "short"]]
    assert show(Group(*make_lines(rows)), 30) == [
        "name  1   a description of se…",
        "n     22  short",
    ]


@pytest.mark.parametrize(
    ("is_terminal", "lines"),
    [
        (True, ["a sentence with", "`a command of words`", "of many words"]),
        (False, ["a sentence with `a command of words` of many words"]),
    ],
)
def test_sentences_are_broken_on_a_terminal_only(is_terminal, lines):
    output = Console(file=io.StringIO(), width=20, force_terminal=is_terminal, color_system=None)
    print_sentence("a sentence with `a command of words` of many words", output)
    assert output.file.getvalue().splitlines() == lines  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("values", "line"),
    [([], ""), ([None], ""), ([0.0, 0.5, 1.0], "▁▅█"), ([None, 0.5], " ▅"), ([-1.0, 0.0], "▁█"),
     ([2.0, 6.0, 10.0], "▁▅█"), ([3.0, 3.0], "▁▁")],
)  # fmt: skip
def test_a_sparkline_shows_rewards_of_any_size_and_leaves_out_missing_ones(values, line):
    assert draw_sparkline(values) == line
    assert len(draw_sparkline([0.5] * 1000)) == 40
