"""Describe every module of the repository by the first sentence of its docstring."""

from __future__ import annotations

import ast
from pathlib import Path

from documentation.markdown import make_table, take_first_sentence
from documentation.site import ROOT

FILE_MAP_HEAD = """# Map of the repository

For whoever looks for the code that does something: every module, with the first sentence of its
docstring.

Start with `lachesis/trainer/loop.py` (the training loop), then `lachesis/supervision/plan.py`
(which processes a run has) and `flows/train.py` (how they become one flow run). Packages may import
those below them and none above:

```text
cli > agent | ui > service > pages > monitor | reporting > orchestration > validation
    > supervision | trainer > runs > env_process > config | tiny_model
    > environment | catalog | engine | rollout_api > base
```

Tests mirror the packages; `tests/engine/test_contract.py` is the real SDK against the engine,
`tests/e2e` are whole runs, `tests/faults` breaks everything that can break, and `tests/programs`
are programs of others.
"""
FOLDERS = ("lachesis", "flows", "tasks", "deployments", "environments", "bench", "documentation")


def list_modules() -> list[Path]:
    """Return every module that the map names, from the root of the repository."""
    files = [file for folder in FOLDERS for file in sorted((ROOT / folder).rglob("*.py"))]
    return [file.relative_to(ROOT) for file in files if "__pycache__" not in file.parts]


def render_file_map() -> str:
    """Return the map, a table per folder."""
    rows_by_folder: dict[str, list[tuple[str, str]]] = {}
    introductions = {}
    for module in list_modules():
        docstring = ast.get_docstring(ast.parse((ROOT / module).read_text(encoding="utf-8")))
        folder, sentence = str(module.parent), take_first_sentence(docstring)
        if module.name == "__init__.py":
            introductions[folder] = sentence
        else:
            rows_by_folder.setdefault(folder, []).append((f"`{module.name}`", sentence))
    parts = [FILE_MAP_HEAD]
    for folder, rows in rows_by_folder.items():
        parts += [f"## {folder}/", ""]
        if introductions.get(folder):
            parts += [introductions[folder], ""]
        parts += [make_table(("module", "what it is for"), rows), ""]
    return "\n".join(parts)
