"""Measure every Python process that has this folder in PYTHONPATH, services and their children
included.

`make coverage` puts it there. Services get only the variables that `lachesis.base.secrets` allows,
so Coverage's own way into child processes, by variables of its own, would not reach them.
"""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]

try:
    import coverage
except ImportError:  # the interpreter of an environment with requirements of its own
    pass
else:
    coverage.Coverage(
        data_file=str(ROOT / ".coverage_parts" / "part"),
        data_suffix=True,
        auto_data=True,
        config_file=str(ROOT / "pyproject.toml"),
    ).start()
