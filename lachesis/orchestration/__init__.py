"""Communicate with Prefect: submit, resume, notify and show."""
