"""Guess a number by calling a tool.

The game has several turns, a state that the model does not see, and calls that may be malformed.
"""

import random
from collections.abc import Iterable
from typing import Any

from pydantic import Field

from lachesis.environment import (
    Chat,
    ConversationEnv,
    ConversationEnvConfig,
    Item,
    MalformedCall,
    Outcome,
    ToolDefinition,
    describe_tools,
    parse_tool_calls,
    zero,
)

MIN_TOKENS_FOR_TOOL = 4096
"""Minimum length limit of a conversation for describing the tool by default."""


class GuessNumberConfig(ConversationEnvConfig):
    max_answer_tokens: int = Field(96, ge=8, le=4096, description="Maximum tokens of one answer")
    max_turns: int = Field(4, ge=1, le=100, description="Maximum guesses per game")
    largest: int = Field(9, ge=1, le=10_000, description="Largest number")
    games: int = Field(200, ge=2, le=100_000, description="Number of games")
    tell_tool: bool | None = Field(
        None,
        description="Whether the prompt describes the tool; by default if max_token_length >= 4096",
    )


class GuessNumberEnv(ConversationEnv):
    """Find a number with the tool `guess`, which answers higher or lower; fewer guesses are worth
    more.
    """

    name = "guess_number"
    env_config_cls = GuessNumberConfig
    # Every found number is a success; the last allowed guess is still worth more than this.
    solved = 0.5
    config: GuessNumberConfig

    def load_dataset(self) -> Iterable[Item]:
        rng = random.Random("guess_number")
        return [
            {"game": game, "number": rng.randint(0, self.config.largest)}
            for game in range(self.config.games)
        ]

    def identity(self, item: Item) -> str:
        return str(item["game"])  # All games have the same prompt.

    @property
    def tool(self) -> ToolDefinition:
        number = {"type": "integer", "minimum": 0, "maximum": self.config.largest}
        parameters = {
            "properties": {"number": number},
            "required": ["number"],
            "additionalProperties": False,
        }
        return ToolDefinition(
            "guess", "Guess the number; the answer is higher, lower or right.", parameters
        )

    def prompt(self, item: Item) -> str:
        task = f"Find my number, from 0 to {self.config.largest}."
        should_describe_tool = self.config.tell_tool
        # A tiny model that was taught on this environment knows the tool and has little room.
        if should_describe_tool is None:
            should_describe_tool = self.config.max_token_length >= MIN_TOKENS_FOR_TOOL
        return f"{describe_tools([self.tool])}\n{task}" if should_describe_tool else task

    async def play(self, item: Item, chat: Chat) -> float | Outcome:
        reply = None
        for turn in range(self.config.max_turns):
            answer = await chat.answer(reply)
            try:
                calls = parse_tool_calls(answer, [self.tool])
            except MalformedCall as error:
                reply = {"role": "tool", "content": str(error)}
                continue
            if not calls:
                return zero("no tool was called")
            guessed = calls[0].arguments["number"]
            if guessed == item["number"]:
                return 1 - turn / (2 * self.config.max_turns)
            reply = {"role": "tool", "content": "higher" if guessed < item["number"] else "lower"}
        return zero("the number was not found")

    def example(self, item: Item, *, right: bool) -> list[dict[str, Any]]:
        """Return a game in the right form, with good or random guesses."""
        low, high = 0, self.config.largest
        messages = self.build_messages(item)
        for _ in range(self.config.max_turns):
            guess = (low + high) // 2 if right else random.randint(0, self.config.largest)
            messages.append({"role": "assistant", "content": format_tool_call(guess)})
            if guess == item["number"]:
                break
            low, high = (guess + 1, high) if guess < item["number"] else (low, guess - 1)
            messages.append(
                {"role": "tool", "content": "higher" if guess < item["number"] else "lower"}
            )
        return messages


def format_tool_call(number: int) -> str:
    return f'<tool_call>{{"name": "guess", "arguments": {{"number": {number}}}}}</tool_call>'


if __name__ == "__main__":
    GuessNumberEnv.cli()
