"""Combine what `make coverage` has measured, print it, and fail below the floors.

The pure modules, which decide with numbers what others act on, have every branch covered; all other
code together has at least `FLOOR` percent of its statements and branches.
"""

import io
import sys
from pathlib import Path

import coverage

ROOT = Path(__file__).resolve().parents[3]
FLOOR = 90.0
PURE = tuple(
    f"lachesis/{name}.py"
    for name in (
        "trainer/batch/group_to_datums", "trainer/batch/advantages", "engine/losses",
        "spending/budgets", "config/field_edits", "inference_tests/verdict",
        "inference_tests/forecast", "monitor/stalls", "monitor/learning_rules",
        "monitor/run_history", "monitor/reward_trend",
    )
)  # fmt: skip


def main() -> int:
    """Return 0 if every floor holds."""
    parts = ROOT / ".coverage_parts"
    measured = coverage.Coverage(
        data_file=str(parts / "whole"), config_file=str(ROOT / "pyproject.toml")
    )
    measured.combine([str(file) for file in parts.glob("part.*")])
    measured.save()
    others = measured.report(omit=list(PURE), skip_covered=True)
    failures = [f"all other code: {others:.1f} %, floor {FLOOR:g} %"] if others < FLOOR else []
    for name in PURE:
        share = measured.report(include=[name], file=io.StringIO())
        print(f"{name}: {share:.1f} %")
        if share < 100:
            failures.append(f"{name}: {share:.1f} %, floor 100 %")
    print(
        "\n".join(["below the floor:", *failures])
        if failures
        else f"floors hold; all other code: {others:.1f} %"
    )
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
