"""Guard the Atropos API, and share its batches between several environments."""
