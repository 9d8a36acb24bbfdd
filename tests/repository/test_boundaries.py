"""Import direction, light imports, sizes, and that only `lachesis` can be imported where we are
installed.
"""

import ast
import importlib.util
import json
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from lachesis.base import errors

ROOT = Path(__file__).resolve().parents[2]
OURS = sorted(
    path
    for folder in ("lachesis", "flows", "tasks", "deployments", "environments")
    for path in (ROOT / folder).rglob("*.py")
)


def subclasses(kind):
    return [one for child in kind.__subclasses__() for one in (child, *subclasses(child))]


@pytest.mark.parametrize("path", OURS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_fits_one_sitting_and_a_function_one_screen(path):
    """400 lines a module, 60 a function; a function that only holds others, such as one of routes,
    counts as those.
    """
    text = path.read_text()
    assert len(text.splitlines()) <= 400
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            inner = [
                one for one in node.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)
            ]
            lines = (
                (node.end_lineno or 0)
                - node.lineno
                + 1
                - sum((one.end_lineno or 0) - one.lineno + 1 for one in inner)
            )
            assert lines <= 60, f"{node.name} has {lines} lines"


LIGHT = (
    "lachesis.config.run_config",
    "lachesis.environment_catalog.lookup",
    "lachesis.config.field_edits",
    "lachesis.operations.launches",
    "lachesis.cli.main",
    "lachesis.cli.commands.train",
    "lachesis.agent_tools.tools",
    "lachesis.agent_tools.hermes_plugin",
    "lachesis.agent_tools.http_routes",
    "lachesis.agent_tools.mcp_server",
    # a launcher that has imported Prefect can hang at its end when the server is gone
    "deployments.serve",
)


def test_imports_stay_light():
    """A command that asks for a status must not load torch. One interpreter imports all modules."""
    script = (
        "import importlib, json, sys\n"
        "loaded = {}\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(name)\n"
        "    loaded[name] = [one for one in ('torch', 'prefect', 'transformers', 'tinker', "
        "'wandb') if one in sys.modules]\n"
        "print(json.dumps(loaded))"
    )
    loaded = json.loads(subprocess.check_output([sys.executable, "-c", script, *LIGHT], cwd=ROOT))
    assert loaded == {name: [] for name in LIGHT}


def test_imports_point_one_way():
    """The contracts in pyproject.toml."""
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "from importlinter.cli import lint_imports_command; lint_imports_command()",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("kind", subclasses(errors.LachesisError), ids=lambda kind: kind.__name__)
def test_every_error_stands_in_the_tree_with_its_code(kind):
    tree = errors.__doc__ or ""
    if kind is errors.RunError:  # It is never raised itself.
        assert re.search(r"RunError\s+also RuntimeError", tree)
    else:
        assert re.search(rf"{kind.__name__}\s+{kind.code}\b", tree)


def test_errors_that_no_program_would_tell_apart_have_one_code():
    assert len(errors.list_error_codes()) <= 26


def test_all_of_our_code_is_checked_by_mypy_and_every_warning_is_an_error():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    assert {"lachesis", "flows", "tasks", "deployments"} <= set(settings["mypy"]["packages"])
    assert settings["mypy"]["strict"] is True
    assert settings["pytest"]["ini_options"]["filterwarnings"][0] == "error"


def test_the_wheel_holds_lachesis_and_nothing_else(tmp_path):
    """Generic names like `tasks` must not reach other people's environments."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--quiet",
        "--no-build-isolation",
        "-w",
        str(tmp_path),
        str(ROOT),
    ]
    subprocess.run(command, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (terms,) = (
            archive.read(name) for name in names if name.endswith(".dist-info/licenses/LICENSE")
        )
    assert terms == (ROOT / "LICENSE").read_bytes(), "the terms travel with the code"
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"lachesis"}


def test_the_readme_is_read_on_a_screen_and_a_half():
    readme = (ROOT / "README.md").read_text()
    assert len(readme.splitlines()) < 90
    links = re.findall(r"\]\((?!https?:)([^)#]+)", readme)
    assert len(links) > 20
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_the_guide_for_agents_is_short():
    assert len((ROOT / "AGENTS.md").read_text().splitlines()) <= 60


# Modules whose names are everyday variables; a module bound as such a name would be shadowed.
EVERYDAY = {
    "record", "folder", "store", "session", "metrics", "spec", "plan", "order", "groups", "search",
    "columns", "writer", "results", "verdict", "forecast", "resume", "draft", "messages", "load",
    "device", "rollout", "dataset", "evaluation", "check", "stages", "schema", "tick", "ports",
    "variables", "curves", "sampling", "resources", "internals", "forms",
}  # fmt: skip


def test_every_file_and_module_that_the_makefile_names_exists():
    targets = re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    commands = subprocess.run(
        ["make", "--dry-run", f"VENV={ROOT / 'no-environment'}", *targets],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    files = set(re.findall(r"\b(?:bench|docs|tests)/[\w/.-]+", commands))
    modules = set(re.findall(r"python -m (\S+)", commands)) - {"venv"}
    assert "tests/faults/test_services.py" in files
    assert "docs_generator" in modules
    assert [name for name in sorted(files) if not (ROOT / name).exists()] == []
    assert [name for name in sorted(modules) if importlib.util.find_spec(name) is None] == []


def test_modules_named_as_everyday_variables_are_imported_by_name_only():
    modules = {".".join(path.relative_to(ROOT).with_suffix("").parts) for path in OURS}
    bound = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {alias.name}"
        for path in OURS
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.name in EVERYDAY and f"{node.module}.{alias.name}" in modules
    ]
    assert bound == []
