"""Describe each service of a run: command, variables, port, readiness; start nothing."""
