"""Find out from a chat template whether a model thinks before it answers, and how to switch it.

Templates are programs in Jinja, and models differ in the word that their template looks for. The
words here are those of the model families that Tinker offers (read in their published templates).
"""

import re
from dataclasses import dataclass
from typing import Literal

from lachesis.base.json_text import Json

Thinking = Literal["default", "on", "off"]
# Keywords that a template compares with true and false; the first one that it uses counts.
_SWITCHES = ("enable_thinking", "thinking")
_EFFORT = "reasoning_effort"
_EFFORTS = ("low", "medium", "high")
# What a model that thinks writes before its answer, or the template writes for it.
_THOUGHT_MARKS = ("<think>", "</think>", "analysis", "<|channel|>")
# What ends a thought; the answer is what follows the last of them.
THOUGHT_BEGINS = ("<think>", "<|channel|>analysis", "[THINK]")
THOUGHT_ENDS = ("</think>", "<|channel|>final<|message|>", "[/THINK]")


@dataclass(frozen=True)
class ThinkingSwitch:
    """Say whether a model thinks, and which keyword of its chat template changes that."""

    thinks: bool
    keyword: str | None = None
    values: tuple[str, ...] = ()
    """The values of the keyword beside true and false, if it has others."""

    @property
    def can_be_off(self) -> bool:
        """Return whether the model can answer without thinking."""
        return not self.thinks or (self.keyword is not None and not self.values)

    def describe(self) -> str:
        """Return the switch in a few words, for a table."""
        if not self.thinks:
            return "does not think"
        if self.keyword is None:
            return "always thinks"
        if self.values:
            return f"{self.keyword}: {', '.join(self.values)}"
        return "on or off"

    def make_kwargs(self, thinking: Thinking) -> Json:
        """Return the keyword arguments of the chat template for thinking on or off.

        Raises:
            ValueError: The model cannot do that.
        """
        if thinking == "default" or (thinking == "off" and not self.thinks):
            return {}
        if self.keyword is None or self.values:
            if thinking == "on" and self.thinks:
                return {}
            raise ValueError(
                f"its chat template cannot switch thinking {thinking} ({self.describe()})"
            )
        return {self.keyword: thinking == "on"}


def build_template_kwargs(template: str | None, thinking: Thinking | None, kwargs: Json) -> Json:
    """Return the keyword arguments of a chat template for a run's settings.

    Args:
        template: The template; None if the tokenizer has none.
        thinking: Whether the model is to think; None is `default`.
        kwargs: Further arguments, which have priority.

    Raises:
        ValueError: The template cannot switch thinking in this way.
    """
    if thinking is None:
        return dict(kwargs)
    switch = find_thinking_switch(template or "")
    return {**switch.make_kwargs(thinking), **kwargs}


def find_thinking_switch(template: str) -> ThinkingSwitch:
    """Return how a chat template switches thinking; None if it has no switch."""
    # A name in quotes or after a dot is no variable of the template.
    for keyword in _SWITCHES:
        if re.search(rf"(?<![\w.'\"]){keyword}(?![\w'\"])", template):
            return ThinkingSwitch(True, keyword)
    if _EFFORT in template:
        return ThinkingSwitch(True, _EFFORT, _EFFORTS)
    return ThinkingSwitch(any(mark in template for mark in _THOUGHT_MARKS))
