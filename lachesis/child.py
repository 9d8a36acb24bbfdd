"""What a child process may see of our environment."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|AUTH(?!OR)", re.IGNORECASE)
SHORTEST = 8
"""Characters of a secret; a shorter value, such as "false", stands in many texts."""
# SLURM_* and INFER_TP change server addresses in Atropos, ATROPOS_* its dialect, OPENAI_* where environments send requests,
# PREFECT_* would let a child act on the flow's behalf.
_MISLEADING = re.compile(r"^(SLURM_|ATROPOS_|OPENAI_|PREFECT_|INFER_TP$|TINKER_|LACHESIS_ENGINE_)")


def redact(text: str, source: Mapping[str, str] | None = None) -> str:
    """The text without the values of this process's secrets. Before it is shortened: half a secret is not found any more."""
    for value in secrets(os.environ if source is None else source):
        text = text.replace(value, "***")
    return text


def secrets(source: Mapping[str, str]) -> list[str]:
    """The values that must stand in no text, the longest first, as one may hold another."""
    found = {value for name, value in source.items() if len(value) >= SHORTEST and _SECRET.search(name)}
    return sorted(found, key=len, reverse=True)


def child_environment(extra: Mapping[str, str], source: Mapping[str, str] | None = None) -> dict[str, str]:
    """Our environment without secrets and without what would mislead a child, then `extra`, which may hold the secrets that
    this one child needs."""
    base = os.environ if source is None else source
    kept = {name: value for name, value in base.items() if not _SECRET.search(name) and not _MISLEADING.match(name)}
    return {**kept, **extra}
