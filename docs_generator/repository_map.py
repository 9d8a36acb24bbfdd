"""Draw the map of the code, and list the pages for language models (`llms.txt`)."""

import ast
import re
from pathlib import Path
from typing import Any

from docs_generator.markdown import make_table, take_first_sentence
from docs_generator.site import DOCS, ROOT, read_navigation

FILE_MAP_HEAD = """# Map of the repository

For whoever looks for the code that does something: the packages by floors, and what each is for.
The first lines of a module say what it is for.

A package imports packages that stand below it, or further down on its floor, and none above;
`|` separates packages that stand side by side and do not import each other. `make lint` holds this
(`tool.importlinter` in `pyproject.toml`, with the arrows that are still to be turned).

Start with `lachesis/trainer/loop.py` (the training loop), then
`lachesis/supervision/services/plan.py` (which processes a run has) and `flows/train.py` (how they
become one flow run).
"""
FILE_MAP_TAIL = """
Tests mirror the packages; `tests/engine/test_contract.py` is the real SDK against the engine,
`tests/e2e` are whole runs, `tests/faults` breaks everything that can break, and `tests/clients`
are programs of others.
"""
FOLDERS = ("lachesis", "flows", "tasks", "deployments", "environments", "bench", "docs_generator")


def list_modules() -> list[Path]:
    """Return every module of the repository but its tests, from the root."""
    files = [file for folder in FOLDERS for file in sorted((ROOT / folder).rglob("*.py"))]
    return [file.relative_to(ROOT) for file in files if "__pycache__" not in file.parts]


def render_file_map() -> str:
    """Return the map: a table of packages for each floor."""
    parts = [FILE_MAP_HEAD]
    for floor, layers in _read_floors().items():
        rows = [
            (f"`{package}`", _read_docstring(f"lachesis/{package}"))
            for layer in layers
            for package in layer.split(" | ")
        ]
        parts += [f"## {floor.capitalize()}", "", f"`{' > '.join(layers)}`", ""]
        parts += [make_table(("package of `lachesis`", "what it is for"), rows), ""]
    rows = [(f"`{folder}`", _read_docstring(folder)) for folder in FOLDERS[1:]]
    parts += ["## Beside the library", "", make_table(("folder", "what it is for"), rows)]
    return "\n".join(parts) + "\n" + FILE_MAP_TAIL


def _read_floors() -> dict[str, list[str]]:
    """Return the layers of the library by their floor, from the contract in `pyproject.toml`."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    layers = (
        text.partition('name = "six floors"')[2].partition("layers = [\n")[2].partition("\n]")[0]
    )
    floors: dict[str, list[str]] = {}
    for line in layers.splitlines():
        if comment := re.fullmatch(r" +# (.+)", line):
            floors[comment[1]] = []
        elif layer := re.fullmatch(r' +"(.+)",', line):
            floors[list(floors)[-1]].append(layer[1])
    return floors


def _read_docstring(folder: str) -> str:
    """Return the first sentence about a package, a module or a folder."""
    path = ROOT / folder
    if (path / "README.md").is_file() and not (path / "__init__.py").is_file():
        return take_first_sentence(_read_first_paragraph(path / "README.md"))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return take_first_sentence(ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))))


LLMS_HEAD = """# Lachesis

> Lachesis trains language models by reinforcement learning: it finds and tests environments, starts
> runs, shows them while they train, stops and resumes them, and hands over the weights.

An agent works with the `rl_*` tools: see [Tools for agents](reference/tools.md) and
[Connect an agent](how-to/agents.md).
"""


def render_llms_text() -> str:
    """Return the list of all pages in the order of the site, with whom each is for."""
    lines = [LLMS_HEAD]
    for entry in read_navigation():
        ((title, target),) = entry.items()
        if isinstance(target, list):
            lines += [f"\n## {title}\n", *map(_make_line, target)]
        elif target != "index.md":
            lines += [f"\n## {title}\n", _make_line(entry)]
    return "\n".join(lines).replace("\n\n\n", "\n\n")


def _make_line(entry: dict[str, Any]) -> str:
    ((title, page),) = entry.items()
    return f"- [{title}]({page}): {_read_first_paragraph(DOCS / page)}"


def _read_first_paragraph(file: Path) -> str:
    """Return the first paragraph after the title, in one line."""
    text = file.read_text(encoding="utf-8")
    match = re.search(r"^# [^\n]+\n+(.+?)\n(?:\n|\Z)", text, re.MULTILINE | re.DOTALL)
    paragraph = " ".join(match[1].split()) if match else ""
    return re.sub(r"\[([^]]+)\]\([^)]+\)", r"\1", paragraph)
