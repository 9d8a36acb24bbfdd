"""Name the pages that are made from the code, and the function that makes each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from documentation.commands import render_commands
from documentation.errors import render_errors
from documentation.fields import render_fields
from documentation.file_map import render_file_map
from documentation.files import render_files
from documentation.http import render_http
from documentation.llms import render_llms_text
from documentation.metrics import render_metrics
from documentation.tools import render_tools
from documentation.variables import render_variables

GENERATED_PAGES: Mapping[str, Callable[[], str]] = MappingProxyType(
    {
        "reference/commands.md": render_commands,
        "reference/fields.md": render_fields,
        "reference/metrics.md": render_metrics,
        "reference/errors.md": render_errors,
        "reference/files.md": render_files,
        "reference/variables.md": render_variables,
        "reference/tools.md": render_tools,
        "reference/http.md": render_http,
        "development/map.md": render_file_map,
        # The last one, because it quotes the others.
        "llms.txt": render_llms_text,
    }
)
NOTE = "<!-- Made by `python -m documentation`; edit the code that it describes. -->\n\n"


def render_generated_page(path: str) -> str:
    """Return the text of a page that is made from the code; `path` is relative to `docs/`."""
    note = NOTE if path.endswith(".md") else ""
    return note + GENERATED_PAGES[path]().rstrip() + "\n"
