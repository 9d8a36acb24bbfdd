"""Show runs as web pages; read-only, behind a token."""
