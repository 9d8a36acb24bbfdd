"""Define the configuration of environments that inherit from `TaskEnv` or `ConversationEnv`."""

from __future__ import annotations

from atroposlib.envs.base import BaseEnvConfig
from pydantic import Field


class TaskEnvConfig(BaseEnvConfig):
    """Fields of every environment written with this package."""

    system_prompt: str | None = Field(None, description="System message before each question")
    max_answer_tokens: int = Field(
        256, ge=1, le=131_072, description="Maximum tokens of one answer"
    )
    temperature: float = Field(1.0, gt=0, le=2, description="Sampling temperature")
    held_out_share: float = Field(
        0.2, gt=0, lt=1, description="Share of the items that are never trained on"
    )
    max_held_out_items: int = Field(100, ge=1, description="Maximum held-out items per evaluation")
    eval_samples: int = Field(4, ge=1, le=64, description="Answers sampled per held-out item")
    data_seed: int = Field(0, ge=0, description="Seed of the order of the training items")
    verifier_timeout_s: float = Field(
        30.0, gt=0, le=3600, description="Maximum seconds to score one answer"
    )
