"""Put the folders that the installed program runs from into the wheel, as `lachesis/project/`.

An editable installation must not get copies: it runs from the checkout.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FOLDERS = ("flows", "tasks", "deployments", "environments", "skills")
# What agents read by MCP; the pictures of the site stay out.
PAGES = ("*.md", "llms.txt")


class ProjectFolders(BuildHookInterface):
    """Add the folders to a wheel that is not editable."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Choose what the wheel includes."""
        if version == "standard":
            pages = [page for pattern in PAGES for page in Path(self.root, "docs").rglob(pattern)]
            names = [*FOLDERS, *(str(page.relative_to(self.root)) for page in pages)]
            build_data["force_include"] |= {name: f"lachesis/project/{name}" for name in names}
