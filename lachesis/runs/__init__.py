"""Keep what is known of each run: folder, record, metrics, end."""
