"""Extend all sequences of all requests together."""
