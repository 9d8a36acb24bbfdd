"""Run inside the process of an environment."""
