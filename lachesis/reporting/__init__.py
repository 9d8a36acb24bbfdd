"""Compute once what every surface says of runs and tests."""
