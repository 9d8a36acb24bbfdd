"""The pages that are made from the code are current, and the written ones agree with it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from docs_generator.generated import GENERATED_PAGES, render_generated_page
from docs_generator.reference_tables import (
    HOME_FILES,
    INTERNAL_VARIABLES,
    RUN_FILES,
    VARIABLES,
    list_error_classes,
)
from docs_generator.repository_map import list_modules
from docs_generator.site import DOCS, ROOT
from lachesis.runs.folder import RunDir
from lachesis.runs.metric_names import METRIC_MEANINGS, describe_metric
from lachesis.runs.metrics import MetricsFile
from tests.repository.snippets import list_pages
from tests.web.real_runs import unpack_runs


@pytest.mark.parametrize("page", GENERATED_PAGES)
def test_a_page_is_made_from_the_code(page):
    """After a change: python -m docs_generator"""
    assert (DOCS / page).read_text(encoding="utf-8") == render_generated_page(page)


def test_every_page_begins_with_its_reader():
    for page in [*list_pages(), *GENERATED_PAGES]:
        if page.endswith(".md") and page != "index.md":
            text = (DOCS / page).read_text(encoding="utf-8")
            assert re.search(r"\A(<!--.*?-->\n\n)?# .+\n\nFor who", text), page


def test_every_file_that_a_guide_for_developers_names_exists():
    for guide in ("AGENTS.md", "docs/development/contributing.md", "bench/README.md"):
        named = re.findall(
            r"`((?:bench|docs|docs_generator|flows|lachesis|tasks|tests)/[^`* ]*)`",
            (ROOT / guide).read_text(),
        )
        only_in_the_wheel = {"lachesis/project/"}
        missing = [name for name in named if not (ROOT / name).exists()]
        assert set(missing) <= only_in_the_wheel, guide


def test_the_map_says_what_every_package_is_for():
    rows = dict(
        re.findall(r"^\| `(\w+)` \| (.*) \|$", (DOCS / "development/map.md").read_text(), re.M)
    )
    packages = {path.parent.name for path in (ROOT / "lachesis").glob("*/__init__.py")}
    assert packages < rows.keys()
    assert [name for name, purpose in rows.items() if not purpose] == []


def test_every_error_has_an_entry_with_what_why_and_what_to_do():
    text = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    entries = dict(re.findall(r"^### (\w+)\n(.*?)(?=^##|\Z)", text, re.DOTALL | re.MULTILINE))
    assert set(entries) == {error.code for error in list_error_classes()}
    for code, entry in entries.items():
        assert re.findall(r"^- \*\*(\w+)\.\*\*", entry, re.MULTILINE) == ["What", "Why", "Do"], code


def test_every_metric_of_real_runs_has_a_meaning(tmp_path):
    store = unpack_runs(tmp_path)
    names: set[str] = set()
    for record in store.all():
        names.update(*MetricsFile(store.dir(record.run_id).metrics).read())
    assert len(names) > 60
    assert [name for name in sorted(names) if not describe_metric(name)] == []
    assert describe_metric("environments/sums/eval/percent_correct")
    assert describe_metric("nothing/at_all") == ""
    assert all(
        meaning[0].islower() or meaning[:2].isupper() for meaning in METRIC_MEANINGS.values()
    )


def test_every_file_of_a_run_is_described(tmp_path):
    run_dir = RunDir(tmp_path, "RUN")
    paths = [value for value in vars(run_dir).values() if isinstance(value, Path)]
    names = {str(path.relative_to(run_dir.path)) for path in paths} - {"."}
    assert set(RUN_FILES) == names
    assert "runs/RUN/" in HOME_FILES


def test_every_variable_of_the_code_is_described():
    """Those of the program itself, as they are read and written in its code."""
    folders = ("lachesis", "flows", "tasks", "deployments")
    text = "\n".join(
        (ROOT / module).read_text(encoding="utf-8")
        for module in list_modules()
        if module.parts[0] in folders
    )
    names = set(re.findall(r"""["'`$](LACHESIS_[A-Z_]+[A-Z])\b""", text))
    # Constants of the code, a prefix, and the name of an earlier release.
    names -= {"LACHESIS_SERVER"}
    described = {name for variables in VARIABLES.values() for name in variables}
    own = {name for name in described if name.startswith("LACHESIS_")}
    assert own | set(INTERNAL_VARIABLES) == names


def test_the_site_is_built_strictly_and_loads_nothing_from_elsewhere(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(tmp_path)]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    assert (built.returncode, built.stdout, built.stderr) == (0, "", "")
    for page in tmp_path.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        assert re.findall(r'<(?:script|img|link|iframe)[^>]+(?:src|href)="https?:', text) == []
