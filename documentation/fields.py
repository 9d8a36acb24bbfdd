"""Describe every field of a run's configuration, from its schema."""

from __future__ import annotations

import json

from documentation.markdown import make_table
from lachesis.config.edits import SECTIONS, ConfigField, ConfigFields, describe_allowed
from lachesis.config.profiles import PROFILES

FIELDS_HEAD = """# Fields of a configuration

For whoever sets a value with `--set`, in a launch file, by a form of Prefect or by a tool: each
field with its default, what it may be, and what it means.

`--set batch_size=64` sets a field by its name; `--set env.batch_size=64` also names its section. An
environment has further fields of its own; `lachesis envs NAME` shows them. `lachesis config NAME`
writes a launch file with all fields. *Locked* says where a field cannot be changed: some fields
belong to the machinery, and some cost money or need experience and are locked on the profile
`tinker`, where an operator may unlock them.

Where a profile has a default of its own, it stands beside the general one.
"""
TITLES = {
    "env": "The section `env`: what is sampled",
    "tinker": "The section `tinker`: how it is trained",
    "openai": "The section `openai`: where environments sample from",
    "limits": "The section `limits`: budgets, and what happens when something goes wrong",
    "rollouts": "The section `rollouts`: which rollouts are kept",
}


def render_fields() -> str:
    """Return the page of all fields, a table per section."""
    # The embedded profile locks least, the Tinker cloud most.
    locked_by_profile = {name: ConfigFields(name).by_name for name in ("embedded", "tinker")}
    parts = [FIELDS_HEAD]
    for section in SECTIONS:
        names = [name for name in locked_by_profile["tinker"] if name.startswith(f"{section}.")]
        rows = [
            _make_row(locked_by_profile["embedded"][name], locked_by_profile["tinker"][name])
            for name in names
        ]
        titles = ("field", "default", "allowed", "meaning", "locked")
        parts += [f"## {TITLES[section]}", "", make_table(titles, rows), ""]
    return "\n".join(parts)


def _make_row(field: ConfigField, on_tinker: ConfigField) -> tuple[str, ...]:
    if field.lock_reason:
        locked = "always"
    else:
        locked = "on `tinker`" if on_tinker.lock_reason else ""
    default = f"`{_format_value(field.default)}`"
    for name, profile in PROFILES.items():
        value = profile.values.get(field.section, {}).get(field.name, field.default)
        if value != field.default:
            default += f"; `{_format_value(value)}` on `{name}`"
    allowed = describe_allowed(field.schema)
    return f"`{field.name}`", default, allowed, field.description, locked


def _format_value(value: object) -> str:
    return str(value) if isinstance(value, str | float) else json.dumps(value)
