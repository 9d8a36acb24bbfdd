"""Environments seen from outside: which there are, what they need, and what fields they have."""
