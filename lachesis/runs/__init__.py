"""Store each run: folder, record, metrics, end."""
