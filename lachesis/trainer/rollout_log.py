"""Store some rollouts of a run as text for people to read."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lachesis.rollout_api.scored_group import get_environment

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)
# Number of groups that are stored over a run.
NUM_LOGGED_GROUPS = 20
MAX_ROLLOUTS = 4
MAX_TEXT_CHARACTERS = 4000


class RolloutLog:
    """Write `rollouts.jsonl`, with one group per line.

    A line has `step`, `environment` if there are several, `prompt`, `responses` and `scores`.
    """

    def __init__(self, path: Path, tokenizer: PreTrainedTokenizerBase, total_steps: int) -> None:
        self.path, self.tokenizer = path, tokenizer
        self.every_steps = max(1, total_steps // NUM_LOGGED_GROUPS)

    def write_group(self, step: int, groups_P: Sequence[Mapping[str, Any]]) -> None:
        """Write one group of the first step and of each twentieth of the run.

        An error is logged and does not affect the run.
        """
        if step != 1 and step % self.every_steps:
            return
        group = next((candidate for candidate in groups_P if candidate.get("tokens")), None)
        if group is None:
            return
        try:
            with self.path.open("a", encoding="utf-8") as file:
                if environment := get_environment(group):
                    environment_field = {"environment": environment}
                else:
                    environment_field = {}
                file.write(
                    json.dumps(
                        {"step": step, **environment_field, **self._decode_group(group)},
                        ensure_ascii=False,
                    )
                    + "\n"
                )
        except Exception as error:
            log.warning("no rollouts were stored at step %d: %s", step, error)

    def _decode_group(self, group: Mapping[str, Any]) -> dict[str, Any]:
        responses, prompt = [], ""
        for tokens_T, masks_T in list(zip(group["tokens"], group["masks"], strict=True))[
            :MAX_ROLLOUTS
        ]:
            loss_mask_T = np.asarray(masks_T) != -100
            if loss_mask_T.any():
                num_prompt_tokens = int(np.argmax(loss_mask_T))
            else:
                num_prompt_tokens = len(loss_mask_T)
            prompt = prompt or self._decode_tokens(tokens_T[:num_prompt_tokens])
            # In a conversation of several turns the response includes the environment's turns.
            responses.append(self._decode_tokens(tokens_T[num_prompt_tokens:]))
        return {
            "prompt": prompt,
            "responses": responses,
            "scores": [float(score) for score in group["scores"][:MAX_ROLLOUTS]],
        }

    def _decode_tokens(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode(np.asarray(tokens).tolist(), skip_special_tokens=True))[
            :MAX_TEXT_CHARACTERS
        ]
