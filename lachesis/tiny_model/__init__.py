"""The tiny model that trains on a laptop: how it is built and taught."""
