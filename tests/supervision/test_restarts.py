"""What a death means is one table, in the code and in the docs."""

from pathlib import Path

from lachesis.supervision.restarts import RESTART_RULES, RestartBudget
from lachesis.supervision.services.order import START_ORDER

PAGE = Path(__file__).resolve().parents[2] / "docs" / "explanations" / "recovery.md"


def test_the_page_says_what_the_code_does():
    lines = PAGE.read_text().splitlines()
    assert set(RESTART_RULES) == set(START_ORDER)
    for name, death in RESTART_RULES.items():
        pauses = ", ".join(f"{pause:g}" for pause in death.pauses_s) or "–"
        assert f"| {name} | {death.meaning} | {pauses} |" in lines


def test_a_service_is_started_again_so_many_times():
    restarts = RestartBudget()
    assert [restarts.next_pause_s("environment") for _ in range(5)] == [1.0, 10.0, 30.0, None, None]
    assert restarts.next_pause_s("engine") is None
    assert restarts.next_pause_s("api") == 1.0, "each counts for itself"
