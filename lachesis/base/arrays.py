"""Name the type of arrays; what needs none does not load numpy."""

from typing import Any

import numpy as np

# An array of any shape and element type; docstrings and suffixes of names give both.
Array = np.ndarray[Any, Any]
