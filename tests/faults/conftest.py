"""One served home per worker, and the table of what happened in it."""

from pathlib import Path

import pytest

from tests.faults.struck_home import StruckHome

COLUMNS = ("fault", "phase", "expected", "seen", "noticed after (s)", "kept", "took (s)")


@pytest.fixture(scope="session")
def served(new_home):
    """A served home; at its end the launcher leaves nothing behind."""
    with pytest.MonkeyPatch.context() as patch:
        served = StruckHome(new_home())
        patch.setenv("LACHESIS_HOME", str(served.home))
        served.serve()
        yield served
        served.stop_serving()
        assert served.processes() == {}


@pytest.fixture(autouse=True)
def in_served_home(request, monkeypatch):
    """Each case begins with a launcher that runs, and no process but its own; a run that a failed
    case has left is ended.
    """
    if "served" not in request.fixturenames:
        yield
        return
    served: StruckHome = request.getfixturevalue("served")
    monkeypatch.setenv("LACHESIS_HOME", str(served.home))
    monkeypatch.setenv("LACHESIS_ENVIRONMENTS", str(Path(__file__).parent))
    served.serve()
    yield
    served.end_all_runs()


@pytest.fixture
def row(record_property):
    """A line of the table."""

    def tell(**values):
        record_property("row", {key.replace("_", " "): str(value) for key, value in values.items()})

    return tell


def pytest_terminal_summary(terminalreporter):
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
