"""Build and teach the tiny model that trains on a laptop."""
