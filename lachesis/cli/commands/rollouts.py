"""Print rollouts of a run: what the model answered, how it was scored, and why."""

from dataclasses import asdict
from typing import Annotated, Literal

from cyclopts import Parameter
from rich.console import Group, RenderableType
from rich.text import Text

from lachesis.base.argparse_types import NUM_ROLLOUTS
from lachesis.base.errors import ArgumentsError
from lachesis.base.json_text import Json
from lachesis.cli.options import Output, Run, number, options_class
from lachesis.cli.terminal import make_pairs_table, print_answer
from lachesis.rollouts.search import FoundRollouts, RolloutQuery, describe_found, find_rollouts
from lachesis.runs.store import RunStore

_OUTCOME_STYLES = {"trained": "green", "invalid": "red", "dropped": "red", "refused": "red"}
# Characters of a text that are shown; --json has all of them.
MAX_SHOWN_CHARACTERS = 2000


@options_class
class RolloutOptions(Output):
    """Options of `lachesis rollouts`."""

    step: Annotated[
        str | None,
        Parameter(help="those of one training step (default: of all steps)", metavar="N|last"),
    ] = None
    worst: Annotated[
        int | None, number(NUM_ROLLOUTS, "the N with the lowest scores", metavar="N")
    ] = None
    best: Annotated[
        int | None, number(NUM_ROLLOUTS, "the N with the highest scores", metavar="N")
    ] = None
    invalid: Annotated[
        bool, Parameter(help="those that could not be scored or trained on, with the reason")
    ] = False
    item: Annotated[
        str | None,
        Parameter(help="those of one item: its key, or a part of the prompt", metavar="KEY|TEXT"),
    ] = None
    limit: Annotated[
        int | None, number(NUM_ROLLOUTS, "maximum number (default: 10)", "--limit", "-n")
    ] = None
    tokens: Annotated[bool, Parameter(help="also the token ids and log-probabilities")] = False


def rollouts(run: Run, /, *, options: RolloutOptions = RolloutOptions()) -> None:
    """Print the rollouts of a run that match the options."""
    store = RunStore()
    record = store.load(run)
    matching = find_rollouts(store.dir(record.run_id).rollouts, _read_query(options))
    answer = {"run_id": record.run_id, **asdict(matching)}
    print_answer(options, answer, _render_found(record.run_id, matching))


def _read_query(options: RolloutOptions) -> RolloutQuery:
    """Return the query that the options describe.

    Raises:
        ArgumentsError: Options contradict each other.
    """
    if sum(map(bool, (options.worst, options.best, options.invalid))) > 1:
        raise ArgumentsError("--worst, --best and --invalid exclude each other; give one of them")
    order: Literal["worst", "best", "first"] = "first"
    if options.worst:
        order = "worst"
    elif options.best:
        order = "best"
    return RolloutQuery(
        step=_parse_step(options.step),
        order=order,
        invalid=options.invalid,
        item=options.item,
        limit=options.worst or options.best or options.limit or RolloutQuery.limit,
        with_tokens=options.tokens,
    )


def _parse_step(text: str | None) -> int | None:
    if text is None:
        return None
    if text == "last":
        return -1
    if text.isdecimal() and int(text) > 0:
        return int(text)
    raise ArgumentsError(f"--step {text!r}: allowed are a training step from 1 on, and `last`")


def _render_found(run_id: str, found: FoundRollouts) -> RenderableType:
    parts: list[RenderableType] = []
    for rollout in found.rollouts:
        parts += [_render_heading(rollout), _render_texts(rollout), Text()]
    return Group(*parts, Text(f"run {run_id}: {describe_found(found)}", style="dim"))


def _render_heading(rollout: Json) -> Text:
    score = "none" if rollout["score"] is None else f"{rollout['score']:g}"
    heading = Text(f"step {rollout['step']}", style="bold")
    heading.append(f" · group {rollout['group']}, rollout {rollout['rollout']} · score {score} · ")
    heading.append(rollout["outcome"], style=_OUTCOME_STYLES.get(rollout["outcome"], "yellow"))
    return heading


def _render_texts(rollout: Json) -> RenderableType:
    """Return the texts of one rollout, with its reward, reason and tokens, as pairs."""
    advantage = rollout["advantage"]
    rows = [
        ("prompt", rollout["prompt"]),
        ("answer", rollout["answer"]),
        ("item", rollout["item"]),
        ("reason", rollout["reason"]),
        ("parts", ", ".join(f"{name} {value:g}" for name, value in rollout["parts"].items())),
        ("advantage", None if advantage is None else f"{advantage:+.3f}"),
        ("key", rollout["item_key"]),
    ]
    if "tokens" in rollout:
        rows.append(("tokens", " ".join(_format_tokens(rollout))))
    return make_pairs_table(
        [(f"  {name}", _shorten(value)) for name, value in rows if value is not None]
    )


def _format_tokens(rollout: Json) -> list[str]:
    """Return the token ids; a sampled one is followed by its log-probability."""
    tokens = rollout["tokens"] or ()
    logprobs = rollout["logprobs"] or [None] * len(tokens)
    return [
        str(token) if logprob is None else f"{token}({logprob:.2f})"
        for token, logprob in zip(tokens, logprobs, strict=True)
    ]


def _shorten(text: str) -> str:
    if len(text) <= MAX_SHOWN_CHARACTERS:
        return text
    return f"{text[:MAX_SHOWN_CHARACTERS]} … ({len(text) - MAX_SHOWN_CHARACTERS} more characters)"
