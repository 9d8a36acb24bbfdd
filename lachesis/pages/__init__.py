"""Show runs as web pages: what each page says, its templates, styles and scripts."""
