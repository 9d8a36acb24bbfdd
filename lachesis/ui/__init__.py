"""Serve the pages of a home to browsers: read-only, behind a token, without any other host."""
