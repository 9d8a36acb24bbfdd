"""Communicate with Prefect: submit, resume, suspend, notify and show."""
