"""Define the Prefect tasks that flows are made of."""
