"""Serve models over the Tinker protocol on this machine."""
