"""Implement the command `lachesis`."""
