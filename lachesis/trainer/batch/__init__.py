"""Make training data of scored groups."""
