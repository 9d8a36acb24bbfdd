"""Test whether a model can learn from an environment, and forecast a run."""
