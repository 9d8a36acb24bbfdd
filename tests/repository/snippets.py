"""Find the blocks of a page that a reader can run, and run them as a reader would."""

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from docs_generator.generated import GENERATED_PAGES
from docs_generator.site import DOCS, read_navigation

BLOCK = re.compile(
    r"^(?:<!-- not run: (?P<reason>.+?) -->\n)?"
    r"```(?P<language>\w+)(?P<rest>[^\n]*)\n(?P<text>.*?)^```",
    re.DOTALL | re.MULTILINE,
)
TITLE = re.compile(r'title="([^"]+)"')
# A reader would not wait longer for one command.
COMMAND_TIMEOUT_S = 500


@dataclass(frozen=True)
class Snippet:
    """Hold a block of a page."""

    language: str
    text: str
    file_name: str
    """The file that a reader saves it as, or nothing."""
    skip_reason: str


def list_pages() -> list[str]:
    """Return the written pages of the site in the order of its navigation."""

    def walk(entries: list[dict[str, object]]) -> list[str]:
        pages: list[str] = []
        for entry in entries:
            (target,) = entry.values()
            pages += walk(target) if isinstance(target, list) else [str(target)]
        return pages

    return [page for page in walk(read_navigation()) if page not in GENERATED_PAGES]


def read_snippets(page: str) -> list[Snippet]:
    """Return the blocks of a page with commands or Python, in order."""
    snippets = []
    for match in BLOCK.finditer((DOCS / page).read_text(encoding="utf-8")):
        if match["language"] in ("console", "python"):
            title = TITLE.search(match["rest"])
            file_name = title[1] if title else ""
            snippets.append(
                Snippet(match["language"], match["text"], file_name, match["reason"] or "")
            )
    return snippets


def list_commands(text: str) -> list[str]:
    """Return the commands of a console block; other lines are what they print."""
    commands: list[str] = []
    for line in text.splitlines():
        if line.startswith("$ "):
            commands.append(line.removeprefix("$ "))
        elif commands and commands[-1].endswith("\\"):
            commands[-1] += f"\n{line}"
    return commands


def make_reader_env(home: Path) -> dict[str, str]:
    """Return the variables of a reader with this home, who has no keys and no server."""
    ours = ("TINKER_", "WANDB_", "PREFECT_API", "LACHESIS_")
    env = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    programs = Path(sys.executable).parent
    return {
        **env,
        "PATH": f"{programs}{os.pathsep}{env['PATH']}",
        "LACHESIS_HOME": str(home),
        "WANDB_MODE": "disabled",
    }


def run_page(page: str, folder: Path, env: dict[str, str]) -> None:
    """Run all blocks of a page in a folder; one that fails ends the test with its output."""
    python_blocks: list[str] = []
    for snippet in read_snippets(page):
        if snippet.skip_reason:
            continue
        if snippet.file_name:
            (folder / snippet.file_name).write_text(snippet.text)
        elif snippet.language == "python":
            # Later blocks of a page go on with the names of the earlier ones.
            python_blocks.append(snippet.text)
        else:
            for command in list_commands(snippet.text):
                _run(["bash", "-c", command], page, folder, env)
    if python_blocks:
        program = "\n".join(python_blocks).replace('__name__ == "__main__"', "False")
        _run([sys.executable, "-c", program], page, folder, env)


def _run(command: list[str], page: str, folder: Path, env: dict[str, str]) -> None:
    finished = subprocess.run(
        command,
        cwd=folder,
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=COMMAND_TIMEOUT_S,
    )
    assert finished.returncode == 0, (
        f"{page}: {command[-1]}\n{finished.stdout[-3000:]}\n{finished.stderr[-3000:]}"
    )
