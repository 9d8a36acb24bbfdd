"""Everything that asks Prefect: submit, resume, suspend, notify and show."""
