"""Check an environment without training."""
