"""Write every rollout of a run to its Parquet files, in a thread, so that training does not wait.

The columns are in `lachesis.rollouts.parquet_files`. Texts are decoded in the thread too. What the
thread could not write (a full disk, a group of a strange form) is counted and logged; training goes
on.
"""

from __future__ import annotations

import hashlib
import json
import logging
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from lachesis.base.json_text import Json
from lachesis.base.reward_values import is_score
from lachesis.inference_server.token_usage import Usage
from lachesis.rollout_api.scored_group import (
    find_fault,
    get_environment,
    get_item,
    get_rollout_overrides,
)
from lachesis.rollouts.columns import (
    add_texts,
    add_versions,
    collect_tokens,
    list_training_logprobs,
    make_token_columns,
)
from lachesis.rollouts.parquet_files import RolloutFolder, RolloutOutcome
from lachesis.trainer.batch.group_to_datums import Batch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)
# Rollouts are written when the oldest of them has waited this long, or when there are so many.
WRITE_INTERVAL_S = 5.0
MAX_WAITING_ROLLOUTS = 5000
# Steps that may wait for the thread; those of a disk that hangs are dropped.
MAX_WAITING_STEPS = 100
MAX_ITEM_CHARACTERS = 4000


@dataclass(frozen=True)
class StepRollouts:
    """Hold the groups of one step as they came, and what became of them."""

    step: int
    groups: Sequence[Mapping[str, Any]]
    batch: Batch
    refused: Sequence[tuple[str, Any]] = ()
    """The reason and the content of what the rollout API refused since the step before."""


class RolloutWriter:
    """Decode and write the rollouts of the steps that are added."""

    def __init__(
        self,
        folder: RolloutFolder,
        tokenizer: PreTrainedTokenizerBase,
        usage: Usage,
        *,
        environment: str,
    ) -> None:
        self.folder, self.tokenizer, self.usage = folder, tokenizer, usage
        self.environment = environment
        self.num_lost_steps = 0
        self._steps: queue.Queue[StepRollouts | None] = queue.Queue(MAX_WAITING_STEPS)
        self._thread = threading.Thread(target=self._write_steps, name="rollouts", daemon=True)

    def start(self, step: int) -> None:
        """Begin after `step`; rollouts of later steps, which are made again, are deleted."""
        if not self.folder.max_bytes:
            return
        try:
            self.folder.discard_after(step)
        except Exception as error:
            log.warning("rollouts after step %d were not deleted: %s", step, error)
        self._thread.start()

    def add(self, step_rollouts: StepRollouts) -> None:
        """Have the rollouts of a step written; this does not wait."""
        if not self.folder.max_bytes:
            return
        try:
            self._steps.put_nowait(step_rollouts)
        except queue.Full:
            self._count_lost(step_rollouts.step, "the disk is too slow")

    def close(self, timeout_s: float = 20.0) -> None:
        """Write the queued rollouts, and end the thread."""
        if self._thread.is_alive():
            self._steps.put(None)
            self._thread.join(timeout_s)

    def _count_lost(self, step: int, reason: object) -> None:
        self.num_lost_steps += 1
        log.warning("the rollouts up to step %d were not kept: %s", step, reason)

    def _write_steps(self) -> None:
        """Collect rollouts in the thread and append them to a file now and then."""
        rows: list[Json] = []
        write_at, step_rollouts = time.monotonic() + WRITE_INTERVAL_S, None
        is_open = True
        while is_open:
            try:
                step_rollouts = self._steps.get(timeout=max(0.0, write_at - time.monotonic()))
                is_open = step_rollouts is not None
                if step_rollouts is not None:
                    rows += self._make_rows(step_rollouts)
            except queue.Empty:
                pass
            if rows and (
                not is_open or time.monotonic() >= write_at or len(rows) >= MAX_WAITING_ROLLOUTS
            ):
                self._append(rows)
                rows = []
            if not rows:
                write_at = time.monotonic() + WRITE_INTERVAL_S

    def _append(self, rows: list[Json]) -> None:
        try:
            tokens = collect_tokens(rows)
            add_texts(rows, tokens, self._decode)
            add_versions(rows, tokens, self.usage.find_version)
            self.folder.append(rows, make_token_columns(rows, tokens))
        except Exception as error:
            self._count_lost(rows[-1]["step"], error)

    def _make_rows(self, step_rollouts: StepRollouts) -> list[Json]:
        """Return a row for each rollout of a step."""
        rows: list[Json] = []
        training_logprobs = list_training_logprobs(step_rollouts.batch)
        for index, group in enumerate(step_rollouts.groups):
            drop_reason = step_rollouts.batch.drop_reasons.get(index)
            if drop_reason is not None:
                rows += self._make_unusable_rows("dropped", drop_reason, group, index)
                continue
            try:
                rows += self._make_group_rows(group, index, step_rollouts.batch)
            except Exception as error:
                log.warning("a group of step %d was not kept: %r", step_rollouts.step, error)
        num_groups = len(step_rollouts.groups)
        for index, (reason, content) in enumerate(step_rollouts.refused):
            rows += self._make_unusable_rows("refused", reason, content, num_groups + index)
        for row in rows:
            row["step"] = step_rollouts.step
            row["trained"] = training_logprobs.get((row["group"], row["rollout"]))
        return rows

    def _make_group_rows(
        self, group: Mapping[str, Any], group_index: int, batch: Batch
    ) -> list[Json]:
        """Return the rows of a group of the right form."""
        num_rollouts = len(group["tokens"])
        logprobs_G = group.get("inference_logprobs")
        common, rows = self._describe_group(group, group_index), []
        for index, overrides in enumerate(get_rollout_overrides(group, num_rollouts)):
            logprobs_T = None
            if logprobs_G is not None and len(logprobs_G):
                logprobs_T = np.asarray(logprobs_G[index], np.float64)
            tokens_T = np.asarray(group["tokens"][index], np.int32)
            mask_T = np.asarray(group["masks"][index], np.int64)
            outcome, advantage = batch.rollout_outcomes.get(
                (group_index, index), ("no signal", None)
            )
            is_invalid = bool(overrides.get("invalid"))
            rows.append(
                {
                    **common,
                    "rollout": index,
                    "score": None if is_invalid else float(group["scores"][index]),
                    "parts": _read_parts(overrides),
                    "advantage": advantage,
                    "outcome": "invalid" if is_invalid else outcome,
                    "reason": _read_reason(overrides),
                    "arrays": (tokens_T, mask_T, logprobs_T),
                }
            )
        return rows

    def _make_unusable_rows(
        self, outcome: RolloutOutcome, reason: str, content: Any, group_index: int
    ) -> list[Json]:
        """Return the rows of a group that was not trained on, whose form may be wrong.

        A group that cannot be read has one row, with its beginning as the answer.
        """
        change: Json = {"advantage": None, "outcome": outcome, "reason": _make_writable(reason)}
        try:
            if isinstance(content, Mapping) and find_fault(content) is None:
                rows = self._make_group_rows(content, group_index, Batch())
                return [{**row, **change} for row in rows]
        except Exception as error:  # Its values may be of any type.
            log.info("a group that was %s cannot be read: %r", outcome, error)
        place = {"group": group_index, "rollout": 0, "environment": self.environment}
        return [{**place, **change, "answer": _write_beginning(content)}]

    def _describe_group(self, group: Mapping[str, Any], group_index: int) -> Json:
        """Return the columns that are the same for all rollouts of a group."""
        item = get_item(group)
        return {
            "group": group_index,
            "environment": _make_writable(get_environment(group) or self.environment),
            "item": _make_writable(item[:MAX_ITEM_CHARACTERS]) if item else None,
            "item_key": _compute_key(item) if item else None,
        }

    def _decode(self, tokens: list[int]) -> str:
        return _make_writable(str(self.tokenizer.decode(tokens, skip_special_tokens=True)))


def _compute_key(item: str) -> str:
    return hashlib.sha256(item.encode(errors="replace")).hexdigest()[:8]


def _make_writable(text: str) -> str:
    """Return a string that UTF-8 can encode; surrogates are replaced."""
    return text.encode(errors="replace").decode()


def _write_beginning(content: Any) -> str:
    """Return the beginning of a group as JSON, whatever its values are."""

    def convert(value: object) -> Any:
        return value.tolist() if isinstance(value, np.ndarray) else repr(value)

    try:
        text = content if isinstance(content, str) else json.dumps(content, default=convert)
    except (TypeError, ValueError, RecursionError):
        text = f"a {type(content).__name__} that cannot be written as JSON"
    return _make_writable(text[:MAX_ITEM_CHARACTERS])


def _read_reason(overrides: Mapping[str, Any]) -> str | None:
    reason = overrides.get("invalid") or overrides.get("zero")
    return None if reason is None else _make_writable(str(reason))


def _read_parts(overrides: Mapping[str, Any]) -> list[tuple[str, float]]:
    """Return the parts of a reward that the environment gave, by name."""
    parts = overrides.get("parts")
    if parts is None or not isinstance(parts, Mapping):  # Most rollouts have none.
        return []
    return [
        (_make_writable(str(name)), float(value))
        for name, value in parts.items()
        if is_score(value)
    ]
