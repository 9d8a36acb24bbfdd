"""What an agent may read besides the tools' answers: run logs, configurations, the skill."""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass
from pathlib import Path

from lachesis.agent.session import Desk
from lachesis.base import paths
from lachesis.base.errors import LachesisError, StorageError, to_compact_json

SCHEME = "lachesis://"
LOG_LINES = 200
NEWEST = 10


@dataclass(frozen=True)
class Resource:
    """One text and where it is."""

    uri: str
    name: str
    description: str
    mime_type: str


def skill_file() -> Path:
    """The skill that teaches an agent these tools; it lies in the checkout."""
    return paths.checkout_dir() / "skills" / "rl-training" / "SKILL.md"


STATIC = (
    Resource(f"{SCHEME}skill", "skill", "When to use which tool, exact calls, what to do when a run is sick", "text/markdown"),
    Resource(f"{SCHEME}config", "config", "The draft of this session with every field", "application/json"),
)
TEMPLATES = (
    Resource(f"{SCHEME}runs/{{run_id}}/config", "run config", "The YAML that a run's processes read", "application/yaml"),
    Resource(
        f"{SCHEME}runs/{{run_id}}/logs/{{service}}",
        "run log",
        f"The last {LOG_LINES} lines of one process of a run: trainer, env, api, engine, or env-NAME of a further environment",
        "text/plain",
    ),
)


def listed(desk: Desk) -> list[Resource]:
    """The fixed ones, and configuration and trainer log of the newest runs."""
    found = [one for one in STATIC if one.name != "skill" or has_skill()]
    for record in desk.service.store.all()[:NEWEST]:
        place = f"{SCHEME}runs/{record.run_id}"
        what = f"of run {record.run_id} ({record.environment}, {record.status})"
        found.append(Resource(f"{place}/config", f"config {what}", f"Configuration {what}", "application/yaml"))
        found.append(Resource(f"{place}/logs/trainer", f"trainer log {what}", f"Trainer log {what}", "text/plain"))
    return found


def has_skill() -> bool:
    """Whether the skill is at hand; it is not in the installed package."""
    with contextlib.suppress(LachesisError):  # no checkout
        return skill_file().is_file()
    return False


def read(desk: Desk, uri: str) -> tuple[str, str]:
    """The text and its type. Raises LachesisError, UnknownRunError among them."""
    path = uri.removeprefix(SCHEME)
    if path == "skill":
        return skill_file().read_text(encoding="utf-8"), "text/markdown"
    if path == "config":
        return to_compact_json(desk.current_config().to_payload()), "application/json"
    found = re.fullmatch(r"runs/([^/]+)/(?:config|logs/([\w-]+))", path) if uri.startswith(SCHEME) else None
    if found is None:
        allowed = ", ".join(one.uri for one in (*STATIC, *TEMPLATES))
        raise LachesisError(f"there is no resource {uri[:200]!r}; allowed: {allowed}")
    if found[2] is not None:
        file, text, _ = desk.service.log(found[1], found[2], LOG_LINES)
        return text or f"{file} is empty or not there yet", "text/plain"
    desk.service.store.load(found[1])
    config = desk.service.store.dir(found[1]).config
    if not config.is_file():
        raise StorageError(f"run {found[1]} has no configuration file at {config}")
    return config.read_text(encoding="utf-8"), "application/yaml"
