"""Whether a model can learn from an environment, and what training will cost."""
