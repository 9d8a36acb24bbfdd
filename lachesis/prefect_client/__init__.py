"""Talk to Prefect, and to the `serve` of a home."""
