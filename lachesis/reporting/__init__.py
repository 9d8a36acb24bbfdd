"""Report on a run: its status, its results, and an HTML page."""
