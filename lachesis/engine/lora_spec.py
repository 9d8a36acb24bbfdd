"""Describe the adapter that a client requests."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

# Alpha is the same at every rank, as in the Tinker service.
ALPHA = 32
MAX_RANK = 512


@dataclass(frozen=True)
class LoraSpec:
    """Describe a requested adapter; `seed` determines the initial A."""

    rank: int = 32
    seed: int | None = None
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as a dictionary."""
        return asdict(self)

    @property
    def scale(self) -> float:
        """Return the factor of the adapter's output."""
        return ALPHA / self.rank
