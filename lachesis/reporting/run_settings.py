"""List the settings of a run: value, default, meaning, and who set it."""

from dataclasses import dataclass
from typing import Any

from pydantic_core import PydanticUndefined

from lachesis.config.field_edits import SECTIONS
from lachesis.config.locked_fields import is_infrastructure
from lachesis.config.run_config import RunConfig
from lachesis.reporting.run_summary import EXCLUDED_SETTINGS
from lachesis.runs.record import RunRecord


@dataclass(frozen=True)
class SettingRow:
    """Hold one setting of a run."""

    name: str
    section: str
    value: Any
    default: Any
    """Empty where it is not known."""
    meaning: str
    is_default: bool
    set_by: str
    """`you` for a value that was given at the start, `profile`, or nothing for a default."""


def list_settings(record: RunRecord, config: RunConfig) -> list[SettingRow]:
    """Return the settings that a person may know, in the order of their sections.

    Addresses and files of this machine, which each run has its own of, are left out.
    """
    rows = []
    for section_name, model in SECTIONS.items():
        section = getattr(config, section_name)
        for name, value in section.model_dump().items():
            info = model.model_fields.get(name)
            key = f"{section_name}.{name}"
            if key in EXCLUDED_SETTINGS or is_infrastructure(key):
                continue
            default: Any = None if info is None else info.default
            is_known = info is not None and default is not PydanticUndefined
            # The default of a field of the environment's own is not kept with the run.
            is_default = key not in record.set_fields and (value == default or not is_known)
            rows.append(
                SettingRow(
                    name=name,
                    section=section_name,
                    value=value,
                    default=default if is_known else "",
                    meaning=" ".join((info.description or "").split()) if info else "",
                    is_default=is_default,
                    set_by=_find_setter(record, key, is_default=is_default),
                )
            )
    return rows


def _find_setter(record: RunRecord, key: str, *, is_default: bool) -> str:
    if key in record.set_fields:
        return "you"
    return "" if is_default else "profile"
