"""The Atropos API with guards before it and shares for several environments."""
