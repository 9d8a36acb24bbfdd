"""`import transformers` reads each file of its models once, and learns the same names."""

from __future__ import annotations

import subprocess
import sys
from types import ModuleType
from typing import Any

import pytest

from lachesis.base.transformers_internals import _change_scan

PROGRAM = """
import builtins, collections, hashlib, statistics, sys

opened = collections.Counter()
real_open = builtins.open

def note_and_open(file, *values, **options):
    opened[str(file)] += 1
    return real_open(file, *values, **options)

builtins.open = note_and_open
if sys.argv[1] == "changed":
    from lachesis.base.transformers_internals import speed_up_transformers_import
    speed_up_transformers_import()
import transformers
from transformers import AutoTokenizer, Qwen2Config, models

structure = [
    sorted(vars(module)["_import_structure"].items()) for module in (transformers, models)
]
text = repr([[(key, sorted(names)) for key, names in part] for part in structure])
read = [count for file, count in opened.items() if "modeling_" in file]
print(hashlib.sha256(text.encode()).hexdigest(), len(text) > 100_000, statistics.mode(read))
"""


def run(kind: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, kind], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_the_same_names_are_learned_in_half_of_the_reads() -> None:
    plain, changed = run("plain"), run("changed")
    assert changed[:2] == plain[:2]
    assert changed[1] == "True"
    assert (plain[2], changed[2]) == ("2", "1")


@pytest.mark.parametrize("missing", ["create_import_structure_from_path", "fetch__all__"])
def test_another_version_of_transformers_is_left_alone(missing: str) -> None:
    scanner: Any = ModuleType("scanner")
    scanner.create_import_structure_from_path = scanner.fetch__all__ = len
    delattr(scanner, missing)
    before = dict(vars(scanner))
    _change_scan(scanner)
    assert vars(scanner) == before
