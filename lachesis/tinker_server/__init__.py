"""Serve the Tinker protocol over HTTP, whichever engine computes."""
