"""Start the Prefect server and the runner of this machine."""
