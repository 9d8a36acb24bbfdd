"""Say where the pages are, and in which order the site has them."""

from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"


def read_navigation() -> list[dict[str, Any]]:
    """Return the entries of the site: a title with a page, or with further entries."""
    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    navigation: list[dict[str, Any]] = settings["nav"]
    return navigation
