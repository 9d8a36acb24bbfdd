"""Export every name that authors of environments import.

    TaskEnv          one question, one answer; write `load_dataset` and `score_answer`
    ConversationEnv  several turns; write `load_dataset` and `play`
    TaskEnvConfig    the fields that both have; inherit from it to add your own
    Outcome          a reward with its parts; `zero` gives a reason, and Invalid is no fault of
                     the answer
    rows             the rows of a JSONL file or of a data set of Hugging Face
    ToolDefinition   tools described in a prompt, and calls parsed from an answer
    Sandbox          programs of the model, run where they can do no harm
    VerifiersEnv     environments of the library verifiers

The names are imported on first use, because importing Atropos takes seconds.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lachesis.environment_toolkit.adapters.verifiers_legacy import VerifiersEnv
    from lachesis.environment_toolkit.dataset import DatasetError, Item, rows
    from lachesis.environment_toolkit.multi_turn import Chat, ConversationEnv, ConversationEnvConfig
    from lachesis.environment_toolkit.rollout import Invalid, Outcome, zero
    from lachesis.environment_toolkit.sandbox import Limits, Sandbox, SandboxResult
    from lachesis.environment_toolkit.single_turn import Rollout, TaskEnv, TaskEnvConfig
    from lachesis.environment_toolkit.tool_calls import (
        MalformedCall,
        ToolCall,
        ToolDefinition,
        describe_tools,
        parse_tool_calls,
    )

_NAMES_OF_MODULE = {
    "adapters.verifiers_legacy": ["VerifiersEnv"],
    "dataset": ["DatasetError", "Item", "rows"],
    "multi_turn": ["Chat", "ConversationEnv", "ConversationEnvConfig"],
    "rollout": ["Invalid", "Outcome", "zero"],
    "sandbox": ["Limits", "Sandbox", "SandboxResult"],
    "single_turn": ["Rollout", "TaskEnv", "TaskEnvConfig"],
    "tool_calls": [
        "MalformedCall", "ToolCall", "ToolDefinition", "describe_tools", "parse_tool_calls",
    ],
}  # fmt: skip
_MODULE_OF_NAME = {name: module for module, names in _NAMES_OF_MODULE.items() for name in names}
__all__ = [
    "Chat", "ConversationEnv", "ConversationEnvConfig", "DatasetError", "Invalid", "Item", "Limits",
    "MalformedCall", "Outcome", "Rollout", "Sandbox", "SandboxResult", "TaskEnv", "TaskEnvConfig",
    "ToolCall", "ToolDefinition", "VerifiersEnv", "describe_tools", "parse_tool_calls", "rows",
    "zero",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF_NAME:
        raise AttributeError(f"lachesis.environment has no {name}; it has {', '.join(__all__)}")
    module = importlib.import_module(f"lachesis.environment_toolkit.{_MODULE_OF_NAME[name]}")
    return getattr(module, name)
