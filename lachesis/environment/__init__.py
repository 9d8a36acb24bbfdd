"""Provide what environments are written with.

    TaskEnv          one question, one answer; write `load_dataset` and `score_answer`
    ConversationEnv  several turns; write `load_dataset` and `play`
    TaskEnvConfig    the fields that both have; inherit from it to add your own
    outcome          Invalid (the answer is not to blame), zero (it is, and why), Outcome
    data             rows of a JSONL file or of a data set of Hugging Face
    toolcalls        tools described in a prompt, and calls parsed from an answer
    sandbox          programs of the model, run where they can do no harm

The names are imported on first use, because importing Atropos takes seconds.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lachesis.environment.conversation import Chat, ConversationEnv, ConversationEnvConfig
    from lachesis.environment.data import DatasetError, Item, rows
    from lachesis.environment.outcome import Invalid, Outcome, zero
    from lachesis.environment.task import Rollout, TaskEnv
    from lachesis.environment.task_config import TaskEnvConfig

_MODULE_OF_NAME = {
    "Chat": "conversation", "ConversationEnv": "conversation",
    "ConversationEnvConfig": "conversation",
    "DatasetError": "data", "Item": "data", "rows": "data",
    "Invalid": "outcome", "Outcome": "outcome", "zero": "outcome",
    "Rollout": "task", "TaskEnv": "task", "TaskEnvConfig": "task_config",
}  # fmt: skip
__all__ = [
    "Chat", "ConversationEnv", "ConversationEnvConfig", "DatasetError", "Invalid", "Item",
    "Outcome", "Rollout", "TaskEnv",
    "TaskEnvConfig", "rows", "zero",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF_NAME:
        raise AttributeError(f"lachesis.environment has no {name}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(f"lachesis.environment.{_MODULE_OF_NAME[name]}"), name)
