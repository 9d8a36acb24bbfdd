"""Prove that two computations of the same weights agree."""
