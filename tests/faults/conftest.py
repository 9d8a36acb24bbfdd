"""One world per worker, and the table of what happened in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.faults.world import World
from tests.served import share_schemas

COLUMNS = ("fault", "phase", "expected", "seen", "noticed after (s)", "kept", "took (s)")


@pytest.fixture(scope="session")
def world(
    tiny_model: Path, schemas: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[World]:
    """A served home; at its end the launcher leaves nothing behind."""
    with pytest.MonkeyPatch.context() as patch:
        home = tmp_path_factory.mktemp("world")
        (home / "models").symlink_to(tiny_model / "models")
        share_schemas(home, schemas)
        patch.setenv("LACHESIS_HOME", str(home))
        world = World(home)
        world.serve()
        yield world
        world.stop_serving()
        assert world.processes() == {}


@pytest.fixture(autouse=True)
def in_world(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each case begins with a launcher that runs, and no process but its own; a run that a failed
    case has left is ended.
    """
    if "world" not in request.fixturenames:
        yield
        return
    world: World = request.getfixturevalue("world")
    monkeypatch.setenv("LACHESIS_HOME", str(world.home))
    monkeypatch.setenv("LACHESIS_ENVIRONMENTS", str(Path(__file__).parent))
    world.serve()
    yield
    world.end_all_runs()


@pytest.fixture
def row(record_property: Callable[[str, object], None]) -> Callable[..., None]:
    """A line of the table."""

    def tell(**values: object) -> None:
        record_property("row", {key.replace("_", " "): str(value) for key, value in values.items()})

    return tell


def pytest_terminal_summary(terminalreporter: Any) -> None:
    lines = []
    for outcome in ("passed", "failed"):
        for report in terminalreporter.stats.get(outcome, []):
            values = dict(report.user_properties).get("row")
            if outcome == "failed" and not values:
                values = {"fault": report.nodeid.rpartition("::")[2]}
            if values and report.when == "call":
                properties = {
                    **values,
                    "took (s)": f"{report.duration:.0f}",
                    "noticed after (s)": values.get("noticed", ""),
                }
                lines.append([properties.get(column, "") for column in COLUMNS] + [outcome])
    if lines:
        terminalreporter.write_line("")
        for line in ([*COLUMNS, "test"], ["---"] * (len(COLUMNS) + 1), *lines):
            terminalreporter.write_line(f"| {' | '.join(line)} |")
        terminalreporter.write_line(f"{len(lines)} cases")
