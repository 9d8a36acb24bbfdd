"""Change things for all surfaces."""
