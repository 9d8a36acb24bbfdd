"""`import transformers` reads each file of its models once, and learns the same names; PEFT leaves
out what no model needs.
"""

from __future__ import annotations

import subprocess
import sys
from types import ModuleType
from typing import Any

import pytest

from lachesis.base.transformers_internals import _change_scan

PROGRAM = """
import builtins, collections, statistics, sys
from pathlib import Path
from lachesis.base.transformers_internals import speed_up_transformers_import

num_reads = collections.Counter()
read = builtins.open

def count_and_open(file, *values, **options):
    num_reads[str(file)] += 1
    return read(file, *values, **options)

builtins.open = count_and_open
finders = len(sys.meta_path)
for _ in range(2):
    speed_up_transformers_import()
assert len(sys.meta_path) == finders + 1
import transformers
from transformers import models
print(statistics.mode(n for file, n in num_reads.items() if "modeling_" in file))

from transformers.utils import import_utils as scanner
folder = Path(models.__file__).parent
changed = scanner.define_import_structure(folder)
for name in ("create_import_structure_from_path", "fetch__all__"):
    setattr(scanner, name, getattr(scanner, name).__wrapped__)
scanner.define_import_structure.cache_clear()
scanner.create_import_structure_from_path.cache_clear()
num_reads.clear()
assert scanner.define_import_structure(folder) == changed
print(len(num_reads) > 1000, sum(map(len, changed.values())) > 1000)
"""


def test_the_same_names_are_learned_by_reading_each_file_once() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["1", "True", "True"]


@pytest.mark.parametrize("missing", ["create_import_structure_from_path", "fetch__all__"])
def test_another_version_of_transformers_is_left_alone(missing: str) -> None:
    scanner: Any = ModuleType("scanner")
    scanner.create_import_structure_from_path = scanner.fetch__all__ = len
    delattr(scanner, missing)
    before = dict(vars(scanner))
    _change_scan(scanner)
    assert vars(scanner) == before


def test_peft_is_imported_without_the_compiler_that_bitsandbytes_loads() -> None:
    program = """
import sys
from lachesis.base.transformers_internals import leave_out_bitsandbytes

leave_out_bitsandbytes()
import peft.helpers
from peft.import_utils import is_bnb_available

print(peft.helpers.bnb, is_bnb_available(), "torch._inductor.compile_fx" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.split() == ["None", "False", "False"], done.stderr
