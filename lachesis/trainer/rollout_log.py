"""Some rollouts of a run in words, for people to read: what was asked, what was said, what it was worth."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lachesis.trainer.batch import environment_of

log = logging.getLogger(__name__)
PARTS = 20
"""So many times over a run one group is kept."""
MOST_ROLLOUTS = 4
MOST_TEXT = 4000


class RolloutFile:
    """`rollouts.jsonl`: one group per line, with `step`, `environment` where there are several, `prompt`, `responses` and
    `scores`."""

    def __init__(self, path: Path, tokenizer: Any, total_steps: int) -> None:
        self.path, self.tokenizer = path, tokenizer
        self.every = max(1, total_steps // PARTS)

    def keep(self, step: int, groups_P: Sequence[Mapping[str, Any]]) -> None:
        """Write one group of the first step and of each twentieth of the run. What goes wrong costs the text, not the run."""
        if step != 1 and step % self.every:
            return
        group = next((one for one in groups_P if one.get("tokens")), None)
        if group is None:
            return
        try:
            with self.path.open("a", encoding="utf-8") as file:
                named = {"environment": name} if (name := environment_of(group)) else {}
                file.write(json.dumps({"step": step, **named, **self._words(group)}, ensure_ascii=False) + "\n")
        except Exception as error:
            log.warning("no rollouts kept at step %d: %s", step, error)

    def _words(self, group: Mapping[str, Any]) -> dict[str, Any]:
        responses, prompt = [], ""
        for tokens_T, masks_T in list(zip(group["tokens"], group["masks"], strict=True))[:MOST_ROLLOUTS]:
            trained_T = np.asarray(masks_T) != -100
            first = int(np.argmax(trained_T)) if trained_T.any() else len(trained_T)
            prompt = prompt or self._text(tokens_T[:first])
            responses.append(self._text(tokens_T[first:]))  # with the environment's own turns, where there are several
        return {"prompt": prompt, "responses": responses, "scores": [float(one) for one in group["scores"][:MOST_ROLLOUTS]]}

    def _text(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode(np.asarray(tokens).tolist(), skip_special_tokens=True))[:MOST_TEXT]
