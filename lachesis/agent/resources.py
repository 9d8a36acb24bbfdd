"""Offer what an agent may read apart from tool answers: run logs, configurations, the skill, and
the documentation.
"""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass
from pathlib import Path

from lachesis.agent.session import AgentSession
from lachesis.base import paths
from lachesis.base.errors import LachesisError, StorageError, shorten
from lachesis.base.json_text import to_compact_json

SCHEME = "lachesis://"
LOG_LINES = 200
MAX_LISTED_RUNS = 10


@dataclass(frozen=True)
class Resource:
    """One readable text and its URI."""

    uri: str
    name: str
    description: str
    mime_type: str


def get_skill_path() -> Path:
    """Return the path of the skill that teaches an agent these tools."""
    return paths.project_dir() / "skills" / "rl-training" / "SKILL.md"


def get_docs_dir() -> Path:
    """Return the folder of the documentation's pages."""
    return paths.project_dir() / "docs"


STATIC_RESOURCES = (
    Resource(
        f"{SCHEME}skill",
        "skill",
        "When to use which tool, exact calls, and what to do when a run has a problem",
        "text/markdown",
    ),
    Resource(
        f"{SCHEME}config",
        "config",
        "The draft of this session with every field",
        "application/json",
    ),
    Resource(
        f"{SCHEME}docs",
        "docs",
        "The pages of the documentation, each with whom it is for",
        "text/markdown",
    ),
)
RESOURCE_TEMPLATES = (
    Resource(
        f"{SCHEME}docs/{{page}}",
        "page",
        "A page of the documentation, as in reference/errors.md",
        "text/markdown",
    ),
    Resource(
        f"{SCHEME}runs/{{run_id}}/config",
        "run config",
        "The YAML that a run's processes read",
        "application/yaml",
    ),
    Resource(
        f"{SCHEME}runs/{{run_id}}/logs/{{service}}",
        "run log",
        f"The last {LOG_LINES} lines of one process of a run: trainer, env, api, engine, or "
        f"env-NAME of a further environment",
        "text/plain",
    ),
)


def list_resources(session: AgentSession) -> list[Resource]:
    """Return the fixed resources, and the configuration and trainer log of the newest runs."""
    resources = [
        resource for resource in STATIC_RESOURCES if resource.name != "skill" or has_skill()
    ]
    for record in session.service.store.all()[:MAX_LISTED_RUNS]:
        run_uri = f"{SCHEME}runs/{record.run_id}"
        run_text = f"of run {record.run_id} ({record.environment}, {record.status})"
        resources.append(
            Resource(
                f"{run_uri}/config",
                f"config {run_text}",
                f"Configuration {run_text}",
                "application/yaml",
            )
        )
        resources.append(
            Resource(
                f"{run_uri}/logs/trainer",
                f"trainer log {run_text}",
                f"Trainer log {run_text}",
                "text/plain",
            )
        )
    return resources


def has_skill() -> bool:
    """Return whether the skill is available."""
    with contextlib.suppress(LachesisError):  # There is no project.
        return get_skill_path().is_file()
    return False


def read_resource(session: AgentSession, uri: str) -> tuple[str, str]:
    """Return the text of a resource and its media type.

    Raises:
        LachesisError: There is no such resource, or it cannot be read.
    """
    path = uri.removeprefix(SCHEME)
    if path == "skill":
        return get_skill_path().read_text(encoding="utf-8"), "text/markdown"
    if path == "docs" or path.startswith("docs/"):
        return _read_page(path.removeprefix("docs").strip("/") or "llms.txt"), "text/markdown"
    if path == "config":
        return to_compact_json(session.get_current_config().to_payload()), "application/json"
    if uri.startswith(SCHEME):
        match = re.fullmatch(r"runs/([^/]+)/(?:config|logs/([\w-]+))", path)
    else:
        match = None
    if match is None:
        allowed = ", ".join(resource.uri for resource in (*STATIC_RESOURCES, *RESOURCE_TEMPLATES))
        raise LachesisError(f"there is no resource {uri[:200]!r}; allowed: {allowed}")
    if match[2] is not None:
        file, text, _ = session.service.read_log(match[1], match[2], LOG_LINES)
        return text or f"{file} is empty or does not exist yet", "text/plain"
    session.service.store.load(match[1])
    config = session.service.store.dir(match[1]).config
    if not config.is_file():
        raise StorageError(f"run {match[1]} has no configuration file at {config}")
    return config.read_text(encoding="utf-8"), "application/yaml"


def _read_page(name: str) -> str:
    """Return the text of a page of the documentation.

    Raises:
        LachesisError: There is no such page.
    """
    folder = get_docs_dir()
    # What is asked for may be any text; only the names of pages reach the disk.
    pages = {str(page.relative_to(folder)): page for page in folder.rglob("*.md")}
    page = pages.get(name, folder / "llms.txt" if name == "llms.txt" else None)
    if page is None or not page.is_file():
        raise LachesisError(
            f"there is no page {shorten(repr(name), 80)}; {SCHEME}docs lists all pages"
        )
    return page.read_text(encoding="utf-8")
