"""Print measurements as a table, with the machine they were made on."""

import os
import platform
import sys

from rich.console import Console
from rich.table import Table


def show(title: str, columns: list[str], rows: list[list[object]]) -> None:
    """Print one table; the caller rounds the numbers."""
    table = Table(*columns, title=f"{title} – {describe_machine()}", title_justify="left")
    for row in rows:
        table.add_row(*map(str, row))
    Console(width=None if sys.stdout.isatty() else 140).print(table)


def describe_machine() -> str:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    python = f"Python {platform.python_version()}"
    return f"{os.cpu_count()} cores, {memory:.0f} GiB, {platform.system()}, {python}"
