"""Decide whether a model can learn from an environment, and forecast what training will cost."""
