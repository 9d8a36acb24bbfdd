"""Name the pages that are made from the code, and the function that makes each."""

import functools
import json
from collections.abc import Callable, Mapping
from types import MappingProxyType

from docs_generator.agent_tools import render_http, render_tools
from docs_generator.commands import render_commands
from docs_generator.reference_tables import (
    render_ends,
    render_errors,
    render_fields,
    render_files,
    render_metrics,
    render_variables,
)
from docs_generator.repository_map import render_file_map, render_llms_text
from lachesis.config.launch_spec import LaunchSpec, TestSpec


def _render_schema(spec: type[LaunchSpec | TestSpec]) -> str:
    """Return the JSON schema of what can be launched."""
    return json.dumps(spec.model_json_schema(), indent=2, ensure_ascii=False)


GENERATED_PAGES: Mapping[str, Callable[[], str]] = MappingProxyType(
    {
        "reference/commands.md": render_commands,
        "reference/fields.md": render_fields,
        "reference/metrics.md": render_metrics,
        "reference/errors.md": render_errors,
        "reference/ends.md": render_ends,
        "reference/files.md": render_files,
        "reference/variables.md": render_variables,
        "reference/tools.md": render_tools,
        "reference/http.md": render_http,
        "reference/launch-spec.json": functools.partial(_render_schema, LaunchSpec),
        "reference/test-spec.json": functools.partial(_render_schema, TestSpec),
        "development/map.md": render_file_map,
        # The last one, because it quotes the others.
        "llms.txt": render_llms_text,
    }
)
NOTE = "<!-- Made by `python -m docs_generator`; edit the code that it describes. -->\n\n"


def render_generated_page(path: str) -> str:
    """Return the text of a page that is made from the code; `path` is relative to `docs/`."""
    note = NOTE if path.endswith(".md") else ""
    return note + GENERATED_PAGES[path]().rstrip() + "\n"
