"""Format environments and their fields for a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from lachesis.base.json_text import Json
from lachesis.cli.console import make_table

if TYPE_CHECKING:
    from lachesis.catalog.scan import ScanResult


def render_environments(scan: ScanResult) -> RenderableType:
    """Return the table of environments, and the files that could not be read."""
    table = make_table("name", "what it is", "file")
    for environment in scan.environments:
        table.add_row(environment.name, environment.description, environment.file_path)
    problems = [
        Text(f"{file} cannot be read: {reason}", style="red")
        for file, reason in scan.problems.items()
    ]
    clashes = [Text(f"{name} is {reason}", style="yellow") for name, reason in scan.clashes.items()]
    return Group(
        table, *problems, *clashes, Text("lachesis envs NAME shows the fields of one", style="dim")
    )


def render_environment(launch_description: Json) -> RenderableType:
    """Return the fields of one environment: those that can be edited, then those that are
    locked.
    """
    table = make_table("field", "type", "value", "what it is")
    locked = make_table("locked field", "value", "why")
    for field in launch_description["fields"]:
        if field["locked"]:
            locked.add_row(
                f"{field['section']}.{field['name']}", str(field["current_value"]), field["locked"]
            )
        else:
            table.add_row(
                f"{field['section']}.{field['name']}",
                field["type"],
                str(field["current_value"]),
                field["description"],
            )
    if launch_description["warning"]:
        warning = [Text(launch_description["warning"], style="yellow")]
    else:
        warning = []
    head = Text(
        f"{launch_description['name']} ({launch_description['class_name']}): "
        f"{launch_description['description']}\n{launch_description['file_path']}\n"
    )
    return Group(head, *warning, table, Text(""), locked)
