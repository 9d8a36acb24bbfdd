"""Give an environment's chat template the run's settings, and check that the trainer has the same.

Environments turn conversations into tokens with their own tokenizer, and so does the inference
server of a run for clients that send messages. If the two disagreed, a model would be trained on
prompts that nobody has shown it; so the first conversation of a process is rendered on both sides.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lachesis.base.errors import RLEnvironmentError
from lachesis.base.json_text import Json
from lachesis.models.chat_template import build_template_kwargs

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TIMEOUT_S = 60.0
# With other options a template renders something else than a prompt.
_PROMPT_OPTIONS = frozenset(
    {"chat_template", "add_generation_prompt", "tokenize", "return_dict", "conversation"}
)


def read_template_settings() -> Json:
    """Return `thinking` and `chat_template_kwargs` of the run or test that this process is for."""
    settings: Json = json.loads(os.environ.get("LACHESIS_TEMPLATE_SETTINGS", "{}"))
    return settings


def install_template_settings(settings: Json, inference_server: tuple[str, str] | None) -> None:
    """Render all conversations with these settings, and compare the first one with the trainer's.

    Args:
        settings: See `read_template_settings`.
        inference_server: The URL and the token of the run's inference server, if there is one.
    """
    from transformers import PreTrainedTokenizerBase

    original = PreTrainedTokenizerBase.apply_chat_template
    pending_checks = [] if inference_server is None else [inference_server]

    @functools.wraps(original)
    def apply_chat_template(
        self: PreTrainedTokenizerBase, conversation: Any, *values: Any, **options: Any
    ) -> Any:
        """Render a conversation by the run's settings, and compare the first prompt."""
        template = options.get("chat_template") or self.chat_template
        extra = build_template_kwargs(
            template if isinstance(template, str) else None,
            settings.get("thinking"),
            settings.get("chat_template_kwargs") or {},
        )
        rendered = original(self, conversation, *values, **{**extra, **options})
        if pending_checks and _is_prompt(rendered, values, options):
            _require_same_tokens(*pending_checks.pop(), list(conversation), list(rendered))
        return rendered

    PreTrainedTokenizerBase.apply_chat_template = apply_chat_template


def _is_prompt(rendered: object, values: Sequence[object], options: Json) -> bool:
    """Return whether a call has rendered the token ids of one conversation for the next answer."""
    is_ids = isinstance(rendered, list) and all(isinstance(token, int) for token in rendered)
    return (
        is_ids
        and not values
        and bool(options.get("add_generation_prompt"))
        and set(options) <= _PROMPT_OPTIONS
    )


def _require_same_tokens(url: str, token: str, messages: list[Json], tokens: list[int]) -> None:
    """Raise RLEnvironmentError if the inference server renders a conversation in another way."""
    import httpx

    from lachesis.base.http_client import request_service

    try:
        answer = request_service(
            "POST",
            f"{url}/tokenize",
            json={"messages": messages},
            headers={"Authorization": f"Bearer {token}"},
            timeout=TIMEOUT_S,
        )
    except httpx.HTTPError:
        return  # A server that does not answer is reported by the first request for a sample.
    if answer.status_code != 200:
        return
    theirs = answer.json()["tokens"]
    if theirs != tokens:
        position = _find_difference(tokens, theirs)
        raise RLEnvironmentError(
            f"the environment and the trainer turn the same conversation into other tokens, from "
            f"position {position} on (here {tokens[position : position + 5]}, there "
            f"{theirs[position : position + 5]}); the environment must use the chat template of "
            "its tokenizer as it is, and tinker.chat_template_kwargs for its options"
        )


def _find_difference(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """Return the first position at which two lists differ."""
    for index, (our_token, their_token) in enumerate(zip(ours, theirs, strict=False)):
        if our_token != their_token:
            return index
    return min(len(ours), len(theirs))
