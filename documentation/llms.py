"""List all pages for a language model that looks for one: `llms.txt` (llmstxt.org)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from documentation.site import DOCS, read_navigation

LLMS_HEAD = """# Lachesis

> Lachesis trains language models by reinforcement learning: it finds and tests environments, starts
> runs, shows them while they train, stops and resumes them, and hands over the weights.

An agent works with the `rl_*` tools: see [Tools for agents](reference/tools.md) and
[Connect an agent](how-to/agents.md).
"""


def render_llms_text() -> str:
    """Return the list of all pages in the order of the site, with whom each is for."""
    lines = [LLMS_HEAD]
    for entry in read_navigation():
        ((title, target),) = entry.items()
        if isinstance(target, list):
            lines += [f"\n## {title}\n", *map(_make_line, target)]
        elif target != "index.md":
            lines += [f"\n## {title}\n", _make_line(entry)]
    return "\n".join(lines).replace("\n\n\n", "\n\n")


def _make_line(entry: dict[str, Any]) -> str:
    ((title, page),) = entry.items()
    return f"- [{title}]({page}): {_read_first_sentence(DOCS / page)}"


def _read_first_sentence(file: Path) -> str:
    """Return the first paragraph after the title, in one line."""
    text = file.read_text(encoding="utf-8")
    match = re.search(r"^# [^\n]+\n+(.+?)\n\n", text, re.MULTILINE | re.DOTALL)
    paragraph = " ".join(match[1].split()) if match else ""
    return re.sub(r"\[([^]]+)\]\([^)]+\)", r"\1", paragraph)
