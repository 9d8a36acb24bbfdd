"""Lay out the rollouts of a run with their tokens, and serve them as a page and as CSV."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast, get_args

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from lachesis.base.formatting import format_reward
from lachesis.base.json_text import Json
from lachesis.reporting.rollouts import (
    AnswerColumn,
    HeldOutList,
    build_answers,
    read_held_out_lists,
    read_item_facts,
)
from lachesis.reporting.run_cache import RunCache
from lachesis.reporting.run_list import read_count
from lachesis.rollouts.groups import (
    Ask,
    GroupOrder,
    GroupQuery,
    GroupTable,
    RolloutGroup,
    read_group,
)
from lachesis.rollouts.parquet_files import count_deleted_rollouts
from lachesis.runs.record import RunRecord
from lachesis.web.inline_svg import average_neighbours
from lachesis.web.rendering import make_csv_response, make_page
from lachesis.web.token_text import load_tokenizer

# How many groups, held-out items, and groups of one item are shown at once.
GROUPS_PER_PAGE, HELD_OUT_SHOWN, MAX_TIMELINE = 20, 6, 12
MAX_DOWNLOADED_GROUPS = 100_000
# The line of rewards above the list, in units of its picture.
STRIP_WIDTH, STRIP_HEIGHT, STRIP_POINTS = 1200, 64, 80
# The questions that most readers have, each a set of filters.
QUESTIONS: tuple[tuple[Ask, str], ...] = (
    ("", "All"),
    ("wrong", "Some wrong"),
    ("all_wrong", "All wrong"),
    ("silent", "Without a signal"),
    ("unscored", "Without a score"),
)


@dataclass(frozen=True)
class RolloutFilter:
    """Say which groups the page shows, and which one is opened."""

    query: GroupQuery
    text: str
    opened: str
    """The opened group: `STEP-GROUP`, or `before-N` or `after-N` for a held-out item."""
    page: int
    by_difference: bool

    @classmethod
    def from_query(cls, query: Mapping[str, str]) -> "RolloutFilter":
        """Return the filter of an address; unknown parameters are ignored."""
        page, ask, order = (query.get(name, "") for name in ("page", "ask", "order"))
        number = read_count(page) or 1
        return cls(
            query=GroupQuery(
                ask=cast(Ask, ask) if ask in get_args(Ask) else "",
                first_step=read_count(query.get("from", "")),
                last_step=read_count(query.get("to", "")),
                reason=query.get("reason", ""),
                environment=query.get("env", ""),
                item=query.get("item", ""),
                order=cast(GroupOrder, order) if order in get_args(GroupOrder) else "newest",
                first=(number - 1) * GROUPS_PER_PAGE,
                limit=GROUPS_PER_PAGE,
            ),
            text=query.get("q", "").strip(),
            opened=query.get("group", ""),
            page=number,
            by_difference=query.get("colour") == "diff",
        )


@dataclass(frozen=True)
class OpenedGroup:
    """Hold the group whose answers are shown."""

    name: str
    """Its name in the address."""
    title: str
    prompt: str
    expected: str | None
    facts: list[tuple[str, str]]
    answers: list[AnswerColumn]
    summary: str
    item_key: str
    timeline: list[RolloutGroup]
    """Groups of the same item over time."""
    has_tokens: bool
    has_difference: bool
    previous: str | None
    following: str | None


@dataclass(frozen=True)
class RewardStrip:
    """Hold the reward over all steps as a line to choose steps on."""

    line: str
    area: str
    first_step: int
    last_step: int
    first_reward: str
    last_reward: str
    mark_x: str | None
    """Where the opened step is."""


@dataclass(frozen=True)
class RolloutPage:
    """Hold the parts of the page of rollouts."""

    record: RunRecord
    lead: str
    lead_rest: str
    questions: list[tuple[Ask, str, int]]
    groups: list[RolloutGroup]
    num_matching: int
    num_groups: int
    num_pages: int
    held_out: dict[str, HeldOutList]
    """Under `before` and `after`, if they were recorded."""
    num_held_out_shown: int
    environments: list[str]
    reasons: list[str]
    strip: RewardStrip | None
    opened: OpenedGroup | None
    filter: RolloutFilter
    num_deleted: int


def build_rollout_page(cache: RunCache, run_id: str, rollout_filter: RolloutFilter) -> RolloutPage:
    """Return the page of a run's rollouts.

    Raises:
        UnknownRunError: There is no such run.
        StorageError: The rollouts cannot be read.
    """
    record, run_dir = cache.load_record(run_id), cache.store.dir(run_id)
    table = cache.read_group_table(run_id, rollout_filter.text)
    groups, num_matching = table.find(rollout_filter.query)
    held_out = read_held_out_lists(run_dir, rollout_filter.text)
    opened = _open_group(cache, record, table, groups, held_out, rollout_filter)
    lead, lead_rest = _write_lead(table, held_out.get("after"))
    return RolloutPage(
        record=record,
        lead=lead,
        lead_rest=lead_rest,
        questions=[
            (ask, title, table.count(ask, rollout_filter.query)) for ask, title in QUESTIONS
        ],
        groups=groups,
        num_matching=num_matching,
        num_groups=table.num_groups,
        num_pages=max(1, -(-num_matching // GROUPS_PER_PAGE)),
        held_out=held_out,
        num_held_out_shown=HELD_OUT_SHOWN,
        environments=table.list_values("environment"),
        reasons=table.list_values("reason"),
        strip=_draw_strip(
            cache.read_reward_samples(run_id, record.total_steps), rollout_filter.opened
        ),
        opened=opened,
        filter=rollout_filter,
        num_deleted=count_deleted_rollouts(run_dir.rollouts),
    )


def _write_lead(table: GroupTable, after: HeldOutList | None) -> tuple[str, str]:
    """Return the first sentence in two parts: how many answers are wrong at the end, and in all."""
    if not table.num_groups and not (after and after.groups):
        return "No rollouts are kept yet.", "A run keeps them from its first step on."
    num_wrong = table.count("wrong", GroupQuery())
    rest = f"Of all {table.num_groups:,} recorded groups, {num_wrong:,} hold a wrong answer."
    if after and after.groups:
        scores = [score for group in after.groups for score in group.scores]
        wrong = sum(score <= 0 for score in scores)
        verb = "is" if wrong == 1 else "are"
        lead = f"{wrong:,} of {len(scores):,} held-out answers {verb} wrong."
        return f"{after.title.capitalize()}, {lead}", rest
    # Without held-out answers, those of the last step say most about the trained model.
    last_step = int(table.frame["step"].max())  # type: ignore[arg-type]
    groups, _ = table.find(GroupQuery(first_step=last_step, last_step=last_step, limit=10_000))
    num_scored = sum(len(group.scores) for group in groups)
    wrong = num_scored - sum(group.num_right for group in groups)
    return f"At step {last_step:,}, {wrong:,} of {num_scored:,} scored answers are wrong.", rest


def _open_group(
    cache: RunCache,
    record: RunRecord,
    table: GroupTable,
    groups: Sequence[RolloutGroup],
    held_out: Mapping[str, HeldOutList],
    rollout_filter: RolloutFilter,
) -> OpenedGroup | None:
    """Return the group that the address names, or the first one of the list."""
    name = rollout_filter.opened or (f"{groups[0].step}-{groups[0].group}" if groups else "")
    when, _, number_text = name.partition("-")
    step, number = read_count(when), read_count(number_text)
    if when in held_out and number is not None:
        return _open_held_out(held_out[when], when, number)
    if step is None or number is None:
        return None
    # Previous and next are those of the list as it is filtered.
    names = [f"{group.step}-{group.group}" for group in groups]
    rows = read_group(cache.store.dir(record.run_id).rollouts, step, number)
    return _open_trained(record, table, rows, name, names, rollout_filter)


def _open_trained(
    record: RunRecord,
    table: GroupTable,
    rows: Sequence[Json],
    name: str,
    names: Sequence[str],
    rollout_filter: RolloutFilter,
) -> OpenedGroup | None:
    """Return a group of a training step; `names` are those of the listed groups."""
    if not rows:
        return None
    place = names.index(name) if name in names else None
    # Rollouts hold token ids only; without the tokenizer the answers are plain text.
    tokenizer = load_tokenizer(record.base_model)
    prompt, item_key = rows[0]["prompt"] or "", rows[0]["item_key"] or ""
    expected, facts = read_item_facts(rows[0]["item"], prompt)
    return OpenedGroup(
        name=name,
        title=f"Step {rows[0]['step']:,}",
        prompt=prompt,
        expected=expected,
        facts=facts,
        answers=build_answers(rows, tokenizer, by_difference=rollout_filter.by_difference),
        summary=describe_scores([row["score"] for row in rows]),
        item_key=item_key,
        timeline=_list_timeline(table, item_key),
        has_tokens=tokenizer is not None,
        has_difference=any(row.get("trained_logprobs") for row in rows),
        previous=names[place - 1] if place else None,
        following=names[place + 1] if place is not None and place + 1 < len(names) else None,
    )


def _open_held_out(held_out: HeldOutList, when: str, number: int) -> OpenedGroup | None:
    """Return a held-out item with its answers, of which tokens are not kept."""
    groups = held_out.groups
    group = next((group for group in groups if group.number == number), None)
    if group is None:
        return None
    rows = [
        {"answer": text, "score": score, "advantage": None, "outcome": "", "reason": None}
        for text, score in zip(group.answers, group.scores, strict=True)
    ]
    numbers = [other.number for other in groups]
    place = numbers.index(number)
    return OpenedGroup(
        name=f"{when}-{number}",
        title=f"{held_out.title.capitalize()}, held out",
        prompt=group.prompt,
        expected=group.expected,
        facts=[],
        answers=build_answers(rows, None),
        summary=describe_scores(group.scores),
        item_key="",
        timeline=[],
        has_tokens=True,
        has_difference=False,
        previous=f"{when}-{numbers[place - 1]}" if place else None,
        following=f"{when}-{numbers[place + 1]}" if place + 1 < len(numbers) else None,
    )


def describe_scores(scores: Sequence[float | None]) -> str:
    """Return how many answers of a group are right, and their mean score."""
    known = [score for score in scores if score is not None]
    if not known:
        return f"none of {len(scores)} has a score"
    right = sum(score > 0 for score in known)
    text = f"{right} of {len(known)} right, mean {format_reward(sum(known) / len(known))}"
    missing = len(scores) - len(known)
    return f"{text}, {missing} without a score" if missing else text


def _list_timeline(table: GroupTable, item_key: str) -> list[RolloutGroup]:
    """Return groups of one item over time, the first and the last among them."""
    if not item_key:
        return []
    groups, _ = table.find(GroupQuery(item=item_key, order="oldest", limit=100_000))
    if len(groups) <= MAX_TIMELINE:
        return groups if len(groups) > 1 else []
    last = len(groups) - 1
    return [groups[round(index * last / (MAX_TIMELINE - 1))] for index in range(MAX_TIMELINE)]


def _draw_strip(samples: Sequence[tuple[int, float]], opened: str) -> RewardStrip | None:
    """Return the reward by step as a line across the page."""
    if len(samples) < 2:
        return None
    last_step = samples[-1][0]
    high = max(1.0, *(value for _, value in samples))
    low = min(0.0, *(value for _, value in samples))
    points = [
        (
            STRIP_WIDTH * step / last_step,
            STRIP_HEIGHT - 2 - (STRIP_HEIGHT - 12) * (value - low) / (high - low),
        )
        for step, value in average_neighbours(samples, STRIP_POINTS)
    ]
    line = "M" + "L".join(f"{x:.0f} {y:.1f}" for x, y in points)
    opened_step = read_count(opened.partition("-")[0])
    return RewardStrip(
        line=line,
        area=f"{line}L{STRIP_WIDTH} {STRIP_HEIGHT}L{points[0][0]:.0f} {STRIP_HEIGHT}Z",
        first_step=samples[0][0],
        last_step=last_step,
        first_reward=format_reward(samples[0][1]),
        last_reward=format_reward(samples[-1][1]),
        mark_x=None if opened_step is None else f"{STRIP_WIDTH * opened_step / last_step:.0f}",
    )


def list_group_rows(cache: RunCache, run_id: str, rollout_filter: RolloutFilter) -> list[Json]:
    """Return all groups that a filter lets through as rows of a table."""
    query = replace(rollout_filter.query, first=0, limit=MAX_DOWNLOADED_GROUPS)
    groups, _ = cache.read_group_table(run_id, rollout_filter.text).find(query)
    return [
        {
            "step": group.step,
            "group": group.group,
            "environment": group.environment,
            "item_key": group.item_key,
            "prompt": group.prompt,
            "rollouts": group.num_rollouts,
            "right": group.num_right,
            "mean_score": group.mean,
        }
        for group in groups
    ]


def show_rollouts(request: Request) -> Response:
    """Answer with the groups of rollouts that the address asks for."""
    cache: RunCache = request.app.state.cache
    rollout_filter = RolloutFilter.from_query(request.query_params)
    page = build_rollout_page(cache, request.path_params["run_id"], rollout_filter)
    return make_page(
        request, "rollouts.html.j2", section="runs", tab="rollouts", record=page.record, page=page
    )


def download_groups(request: Request) -> Response:
    """Answer with all groups that the address asks for as CSV."""
    cache: RunCache = request.app.state.cache
    record = cache.load_record(request.path_params["run_id"])
    rollout_filter = RolloutFilter.from_query(request.query_params)
    rows = list_group_rows(cache, record.run_id, rollout_filter)
    return make_csv_response(f"rollouts-{record.run_id}.csv", rows)


ROLLOUT_ROUTES = [
    Route("/runs/{run_id}/rollouts", show_rollouts),
    Route("/runs/{run_id}/rollouts.csv", download_groups),
]
