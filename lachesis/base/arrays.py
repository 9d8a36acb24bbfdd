"""Name the type of the numeric arrays that functions pass to each other."""

from __future__ import annotations

from typing import Any

import numpy as np

# An array of any shape and element type; docstrings and suffixes of names give both.
Array = np.ndarray[Any, Any]
