"""PEFT leaves bitsandbytes out where it is told to."""

import subprocess
import sys


def test_peft_is_imported_without_the_compiler_that_bitsandbytes_loads():
    program = """
import sys
from lachesis.models.transformers_import import leave_out_bitsandbytes

leave_out_bitsandbytes()
import peft.helpers
from peft.import_utils import is_bnb_available

print(peft.helpers.bnb, is_bnb_available(), "torch._inductor.compile_fx" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.split() == ["None", "False", "False"], done.stderr
